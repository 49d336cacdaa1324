"""`dflash-cpp serve-python`: the server of llama-cpp-python with a `DFlashLlama` in it.

Settings, routes and locking are llama_cpp.server's own; only the class that it loads is another.
Importing this module needs the packages of the extra `python-server`.
"""

# ruff: noqa: UP045  (llama_cpp.server makes its options from annotations; it knows no `str | None`)

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Optional

from pydantic import Field, ValidationError

from dflash_convert.errors import InputError

from ._memory import llama_cpp  # points llama_cpp at our libraries: before llama_cpp.server
from .llama import DFlashLlama
from .opening import need_file

import uvicorn  # isort: skip
from llama_cpp.server import app as base_app  # isort: skip
from llama_cpp.server import cli, model, settings  # isort: skip

PROGRAM = "dflash-cpp serve-python"
_CONFIG_VARIABLE = "CONFIG_FILE"  # read by llama_cpp.server, which knows no drafts
_UNUSED = ("mul_mat_q", "rpc_servers")  # llama_cpp.server gives these and `Llama` ignores them


class DraftSettings(settings.ModelSettings):
    """Settings of llama_cpp.server for one model, and those of its draft."""

    draft: Optional[str] = Field(
        default=None,
        description="Path of the DFlash draft; with a repository, its file name or pattern there.",
    )
    draft_repo_id: Optional[str] = Field(
        default=None, description="Hub repository of the draft, if not that of the target."
    )
    n_draft: Optional[int] = Field(
        default=None, description="Tokens to draft per round at most (default: block - 1)."
    )
    p_min: float = Field(default=0.0, description="End a draft before a token less probable.")
    verify: str = Field(default="auto", description="auto, reject or match.")
    adaptive: Optional[bool] = Field(
        default=None, description="Draft as many tokens as pay (default: true)."
    )
    speculate: bool = Field(default=True, description="Whether to draft at all.")
    n_gpu_layers_draft: Optional[int] = Field(
        default=None, description="Layers of the draft on the GPU, -1 for all."
    )
    logits_all: bool = Field(
        default=False,
        description="Keep the scores of every token, which logprobs need; decodes plainly.",
    )

    def draft_options(self) -> dict[str, Any]:
        """Return the keywords of `DFlashLlama` about drafting, except where the draft is."""
        names = ("n_draft", "p_min", "verify", "adaptive", "speculate", "n_gpu_layers_draft")
        return {name: getattr(self, name) for name in names}


class AllSettings(settings.ServerSettings, DraftSettings):
    """What the command line takes."""


class ConfigFile(settings.ServerSettings):
    """What a config file holds."""

    models: list[DraftSettings] = Field(default=[], description="Model configs")


class DraftProxy(model.LlamaProxy):
    """Loads `DFlashLlama` where its base loads `Llama`."""

    @staticmethod
    def load_llama_from_model_settings(settings: Any) -> Any:
        """Load one model, with its draft."""
        # the base looks the class up by this name, and only here
        names = vars(llama_cpp)
        plain, names["Llama"] = names["Llama"], _maker(settings)
        try:
            return model.LlamaProxy.load_llama_from_model_settings(settings)
        finally:
            names["Llama"] = plain


def serve(arguments: Sequence[str]) -> None:
    """Load what the arguments of `serve-python` name and serve it until interrupted.

    Raises:
        InputError: An argument is unknown or wrong, or the pair does not fit.
    """
    server, models = read_settings(arguments)
    vars(base_app)["LlamaProxy"] = DraftProxy
    application = base_app.create_app(server_settings=server, model_settings=[*models])
    uvicorn.run(
        application,
        host=server.host,
        port=server.port,
        ssl_keyfile=server.ssl_keyfile,
        ssl_certfile=server.ssl_certfile,
    )


def read_settings(
    arguments: Sequence[str],
) -> tuple[settings.ServerSettings, list[DraftSettings]]:
    """Return the settings of the server and of its models.

    Raises:
        InputError: With what is wrong.
    """
    parser = _Parser(prog=PROGRAM, description="Serve DFlashLlama under OpenAI's API.")
    cli.add_args_from_model(parser, AllSettings)
    parser.add_argument("--config_file", help="JSON or YAML file of settings, several models.")
    given = parser.parse_args(list(arguments))
    server: settings.ServerSettings
    file = os.environ.pop(_CONFIG_VARIABLE, None) or given.config_file
    try:
        if file:
            config = ConfigFile.model_validate_json(_json_text(Path(file)))
            server, models = config, config.models
        else:
            parse: Any = cli.parse_model_from_args
            server, models = parse(settings.ServerSettings, given), [parse(DraftSettings, given)]
    except ValidationError as exc:
        raise InputError(_sentence(exc), hint=f"see `{PROGRAM} --help`") from exc
    if not models:
        raise InputError(f"`{file}` names no models, expected at least one under `models`")
    for one in models:
        _check_files(one)
    return server, models


class _Parser(argparse.ArgumentParser):
    """argparse with errors in the house form."""

    def error(self, message: str) -> NoReturn:
        # argparse names the parsing functions of llama_cpp.server
        for name, word in (
            ("_parse_bool_arg", "true or false"),
            ("_parse_json_object_arg", "JSON"),
        ):
            message = message.replace(f"invalid {name} value", f"expected {word}, found")
        raise InputError(message, hint=f"see `{PROGRAM} --help`")


def _json_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InputError(f"cannot read the config file `{path}`: {exc}") from exc
    if path.suffix not in (".yaml", ".yml"):
        return text
    import yaml  # type: ignore[import-untyped]

    try:
        return json.dumps(yaml.safe_load(text))
    except yaml.YAMLError as exc:
        raise InputError(f"the config file `{path}` is not YAML: {exc}") from exc


def _sentence(exc: ValidationError) -> str:
    """Return the first thing that pydantic found, under the name of its option."""
    first = exc.errors()[0]
    name = ".".join(str(part) for part in first["loc"]) or "config file"
    if first["type"] == "missing":
        return f"--{name} is missing, expected a target and its draft"
    if first["type"] == "extra_forbidden":
        return f"`{name}` is no known setting"
    return f"--{name}: {first['msg']}"


def _check_files(one: DraftSettings) -> None:
    if one.draft_model is not None:
        raise InputError("--draft_model is llama-cpp-python's own way to draft; give --draft")
    if one.hf_model_repo_id is not None:
        return
    if one.draft_repo_id is not None:
        raise InputError("--draft_repo_id needs --hf_model_repo_id, the repository of the target")
    if one.draft is None:
        raise InputError("--draft is missing, expected a target and its draft")
    need_file(Path(one.model), "target")
    need_file(Path(one.draft), "draft")


def _maker(one: DraftSettings) -> Any:
    """Return what stands for the class `Llama` while one model is loaded."""
    draft: dict[str, Any] = {"draft_path": one.draft}
    hub: dict[str, Any] = {"draft_repo_id": one.draft_repo_id, "draft_filename": one.draft}

    def maker(open_model: Any, where: dict[str, Any]) -> Any:
        def make(**kwargs: Any) -> Any:
            used = {name: value for name, value in kwargs.items() if name not in _UNUSED}
            return open_model(**where, **one.draft_options(), **used)

        return make

    made = maker(DFlashLlama, draft)
    made.from_pretrained = maker(DFlashLlama.from_pretrained, hub)
    return made
