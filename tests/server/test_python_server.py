"""llama-cpp-python's server with a `DFlashLlama`, asked by OpenAI's client, beside a plain one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from bigram import Bigram

from dflash_convert.errors import InputError
from dflash_cpp.server import free_port

pytestmark = pytest.mark.native

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi", reason="the packages of the extra `python-server` are missing")

MESSAGES = [{"role": "user", "content": "tell me about the sea"}]
TOKENS = 40
SECONDS = 120.0
COMMON = ("--n_ctx", 512, "--n_threads", 1, "--n_threads_batch", 1, "--flash_attn", "true",
          "--verbose", "false")  # fmt: skip


class PythonServer:
    """A Python module that serves, on a free port, until closed."""

    def __init__(self, module: list[str], options: tuple[Any, ...], lib_dir: Path, log: Path):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        arguments = [*COMMON, "--host", "127.0.0.1", "--port", port, *options]
        environment = os.environ | {"LLAMA_CPP_LIB_PATH": str(lib_dir)}
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *module, *(str(a) for a in arguments)],
                stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment,
            )  # fmt: skip
        http = httpx.Client(trust_env=False, timeout=SECONDS)
        self.api = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", http_client=http, max_retries=0
        )

    def wait_ready(self) -> None:
        until = time.monotonic() + SECONDS
        while True:
            assert self.process.poll() is None, self.log.read_text("utf-8", "replace")[-3000:]
            assert time.monotonic() < until, "the server was not ready in time"
            try:
                self.api.models.list()
                return
            except openai.APIConnectionError:
                time.sleep(0.1)

    def close(self) -> None:
        self.api.close()
        self.process.terminate()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()

    def chat(self, **options: Any) -> Any:
        options = {"temperature": 0.0, "max_tokens": TOKENS, "messages": MESSAGES} | options
        return self.api.chat.completions.create(model="any", **options)

    def complete(self, prompt: str = "the cat sat", **options: Any) -> Any:
        options = {"temperature": 0.0, "max_tokens": TOKENS} | options
        return self.api.completions.create(model="any", prompt=prompt, **options)


Start = Callable[..., PythonServer]


@pytest.fixture(scope="module")
def pair(bigram: Callable[..., Bigram]) -> Bigram:
    return bigram("llama")


@pytest.fixture(scope="module")
def start(lib_dir: Path, pair: Bigram, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start servers that end with the module: with a draft, or the base's own without one."""
    running: list[PythonServer] = []
    folder = tmp_path_factory.mktemp("python-servers")

    def begin(draft: bool, *options: Any) -> PythonServer:
        module = ["dflash_cpp", "serve-python"] if draft else ["llama_cpp.server"]
        files = ("--model", pair.target, *(("--draft", pair.draft) if draft else ()))
        log = folder / f"{len(running)}.log"
        running.append(PythonServer(module, (*files, *options), lib_dir, log))
        return running[-1]

    yield begin
    for server in running:
        server.close()


def two(start: Start, *options: Any) -> tuple[PythonServer, PythonServer]:
    """A plain server and ours, both ready; they start side by side."""
    servers = start(False, *options), start(True, *options)
    for server in servers:
        server.wait_ready()
    return servers


@pytest.fixture(scope="module")
def both(start: Start) -> tuple[PythonServer, PythonServer]:
    return two(start, "--logits_all", "false")


def test_chat_and_completion_equal_those_of_llama(
    both: tuple[PythonServer, PythonServer],
) -> None:
    plain, drafted = ([s.chat().choices[0], s.complete().choices[0]] for s in both)
    assert plain == drafted
    assert len(plain[1].text) > TOKENS // 2


def streamed(chunks: Any) -> list[str]:
    return [c.choices[0].text for c in chunks]


def test_streaming(both: tuple[PythonServer, PythonServer]) -> None:
    plain, drafted = ([streamed(s.complete(stream=True)), s.complete()] for s in both)
    assert drafted[0] == plain[0]
    assert "".join(drafted[0]) == drafted[1].choices[0].text
    chat = both[1].chat(stream=True)
    said = "".join(c.choices[0].delta.content or "" for c in chat)
    assert said == both[1].chat().choices[0].message.content


def test_stop_strings(both: tuple[PythonServer, PythonServer]) -> None:
    whole = both[0].complete().choices[0].text
    stop = whole[len(whole) // 2 :][:2]
    plain, drafted = (s.complete(stop=[stop]).choices[0] for s in both)
    assert drafted == plain
    assert (drafted.text, drafted.finish_reason) == (whole.split(stop)[0], "stop")


@pytest.mark.parametrize("n", [1, 2])
def test_few_tokens(both: tuple[PythonServer, PythonServer], n: int) -> None:
    plain, drafted = (s.complete(max_tokens=n) for s in both)
    assert drafted.choices == plain.choices
    assert drafted.usage.completion_tokens == n


def test_a_seed_repeats_a_sampled_text(both: tuple[PythonServer, PythonServer]) -> None:
    texts = [both[1].complete(temperature=1.0, seed=s).choices[0].text for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_json_schema(both: tuple[PythonServer, PythonServer]) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    wanted = {"type": "json_object", "schema": schema}
    plain, drafted = (s.chat(response_format=wanted).choices[0] for s in both)
    assert drafted == plain
    assert json.loads(drafted.message.content)["a"] in ("x", "y")


def test_tools(both: tuple[PythonServer, PythonServer]) -> None:
    parameters = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    tool = {"type": "function", "function": {"name": "light", "parameters": parameters}}
    choice = {"type": "function", "function": {"name": "light"}}
    plain, drafted = (
        s.chat(tools=[tool], tool_choice=choice).choices[0].message.tool_calls[0].function
        for s in both
    )
    assert drafted == plain
    assert drafted.name == "light"
    assert json.loads(drafted.arguments)["on"] in (True, False)


def test_an_aborted_stream_leaves_the_server_in_order(
    both: tuple[PythonServer, PythonServer],
) -> None:
    server = both[1]
    expected = server.complete().choices[0].text
    for taken in (1, 3):
        with server.complete("another text", stream=True, max_tokens=400) as stream:
            for _, _chunk in zip(range(taken), stream, strict=False):
                pass
        assert server.complete().choices[0].text == expected


def test_two_clients_at_once(both: tuple[PythonServer, PythonServer]) -> None:
    prompts = ["the cat sat", "one two three"] * 3
    expected = [both[0].complete(p).choices[0].text for p in prompts]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda p: both[1].complete(p).choices[0].text, prompts))
    assert found == expected


def test_a_new_request_interrupts_a_stream(both: tuple[PythonServer, PythonServer]) -> None:
    """llama_cpp.server's default: the stream ends where it is, the new request is answered."""
    server = both[1]
    whole = server.complete("one two three", max_tokens=400).choices[0].text
    expected = server.complete().choices[0].text
    stream = server.complete("one two three", stream=True, max_tokens=400)
    first = next(iter(stream)).choices[0].text
    assert server.complete().choices[0].text == expected
    assert whole.startswith(first + "".join(streamed(stream)))


def test_logprobs_need_the_scores_of_every_token(
    start: Start, both: tuple[PythonServer, PythonServer]
) -> None:
    with pytest.raises(openai.InternalServerError, match="logprobs is not supported"):
        both[1].complete(logprobs=2)
    assert both[1].complete().choices == both[0].complete().choices
    servers = two(start, "--logits_all", "true")
    plain, drafted = (s.complete(logprobs=2, max_tokens=8).choices[0] for s in servers)
    assert drafted == plain
    assert len(drafted.logprobs.tokens) == 8


# --- in this process ------------------------------------------------------------------------------


def settings(pair: Bigram, *more: Any) -> Any:
    from dflash_cpp.python_server import read_settings

    given = ["--model", pair.target, "--draft", pair.draft, *COMMON, *more]
    return read_settings([str(a) for a in given])


def test_the_draft_answers(our_library: None, pair: Bigram) -> None:
    from dflash_cpp._memory import llama_cpp
    from dflash_cpp.llama import DFlashLlama
    from dflash_cpp.python_server import DraftProxy

    plain = llama_cpp.Llama
    proxy = DraftProxy(settings(pair, "--n_draft", 3)[1])
    assert llama_cpp.Llama is plain
    llm: Any = proxy()
    assert isinstance(llm, DFlashLlama)
    llm("the cat sat", max_tokens=20, temperature=0.0)
    assert llm.n_draft == 3
    assert llm.last_stats is not None
    assert llm.last_stats.accepted > 0
    # under a grammar, too; a processor in Python rules it out
    message, wanted = {"role": "user", "content": "a"}, {"type": "json_object"}
    llm.create_chat_completion([message], max_tokens=20, temperature=0.0, response_format=wanted)
    assert llm.last_stats.drafted > 0
    llm("the cat sat", max_tokens=4, temperature=0.0, logit_bias={"5": 1.0})
    assert llm.last_stats.mode == "plain"
    proxy.free()


def test_a_draft_from_the_hub(our_library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_cpp import python_server

    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        python_server.DFlashLlama, "from_pretrained", lambda **kwargs: seen.update(kwargs)
    )
    given = ["--hf_model_repo_id", "org/a", "--model", "*Q8_0.gguf", "--draft_repo_id", "org/b"]
    python_server.DraftProxy(python_server.read_settings(given)[1])
    assert (seen["repo_id"], seen["filename"]) == ("org/a", "*Q8_0.gguf")
    assert (seen["draft_repo_id"], seen["draft_filename"]) == ("org/b", None)


@pytest.mark.parametrize("name", ["models.json", "models.yaml"])
def test_config_file(
    our_library: None, pair: Bigram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from dflash_cpp.python_server import read_settings

    one = {"model": str(pair.target), "draft": str(pair.draft), "model_alias": "a", "n_draft": 2}
    file = tmp_path / name
    file.write_text(json.dumps({"port": 81, "models": [one, one | {"model_alias": "b"}]}))
    server, models = read_settings(["--config_file", str(file)])
    assert server.port == 81
    assert [(m.model_alias, m.n_draft) for m in models] == [("a", 2), ("b", 2)]
    # the base would read the variable again, and knows no drafts
    monkeypatch.setenv("CONFIG_FILE", str(file))
    assert len(read_settings([])[1]) == 2
    assert "CONFIG_FILE" not in os.environ


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--colour", "blue"], "unrecognized arguments: --colour blue"),
        ([], "--model is missing"),
        (["--model", "TARGET"], "--draft is missing"),
        (["--model", "none.gguf", "--draft", "DRAFT"], "the target `none.gguf` does not exist"),
        (["--model", "TARGET", "--draft", "none.gguf"], "the draft `none.gguf` does not exist"),
        (["--model", "TARGET", "--draft", "DRAFT", "--n_ctx", "x"], "--n_ctx: invalid int value"),
        (["--model", "TARGET", "--draft", "DRAFT", "--n_ctx", "-4"], "--n_ctx: Input should be"),
        (["--adaptive", "maybe"], "--adaptive: expected true or false, found: 'maybe'"),
        (["--model", "a", "--draft_repo_id", "b/c"], "--draft_repo_id needs --hf_model_repo_id"),
        (["--model", "a", "--draft_model", "prompt"], "give --draft"),
        (["--config_file", "none.json"], "cannot read the config file `none.json`"),
    ],
)
def test_errors(our_library: None, pair: Bigram, arguments: list[str], says: str) -> None:
    from dflash_cpp.python_server import read_settings

    files = {"TARGET": str(pair.target), "DRAFT": str(pair.draft)}
    with pytest.raises(InputError) as caught:
        read_settings([files.get(a, a) for a in arguments])
    assert says in caught.value.message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "config file: Invalid JSON"),
        ("{}", "names no models"),
        ('{"models": [{"model": "a", "colour": 1}]}', "`models.0.colour` is no known setting"),
    ],
)
def test_errors_of_a_config_file(our_library: None, tmp_path: Path, text: str, says: str) -> None:
    from dflash_cpp.python_server import read_settings

    file = tmp_path / "models.json"
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        read_settings(["--config_file", str(file)])
    assert says in caught.value.message


def test_missing_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    from dflash_convert.errors import run_cli
    from dflash_cpp.cli import app

    monkeypatch.setitem(sys.modules, "fastapi", None)
    for name in [n for n in sys.modules if n.startswith(("llama_cpp.server", "fastapi."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "dflash_cpp.python_server", raising=False)
    with pytest.raises(SystemExit) as end:
        run_cli(app, ["serve-python"], prog_name="dflash-cpp")
    assert end.value.code == 2
    assert "the package fastapi is missing" in capsys.readouterr().err
