"""llama.cpp's own server tests, from the base's source, against our llama-server.

They run where they are unpacked, in a process of their own, by `base_server_plugin`. Tiny models
of this machine stand for those they would download, so some expect texts or token counts that only
their own model has: the stock server with the same stand-ins tells which. Every test that passes
there must pass with ours, alone and with a DFlash draft.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from base_sources import unpack
from bigram import make_bigram

from dflash_cpp import demo_pair
from dflash_cpp.server import free_port

pytestmark = [pytest.mark.peer, pytest.mark.native, pytest.mark.timeout(3600)]

NEEDED = ("vendor/llama.cpp/tools/server/", "vendor/llama.cpp/models/templates/")
TESTS = Path("vendor") / "llama.cpp" / "tools" / "server" / "tests"
COMMIT = "0" * 40  # of the repositories in the hub's cache that we fill

VISION = "needs a model that sees, and pictures from the network"
CONTAINER = "starts containers"
NETWORK = "downloads from the hub"
PAGE = "needs the web page, which is not built"
# Files, tests or single cases -> why they are not run.
LEFT_OUT = {
    "unit/test_vision_api.py": VISION,
    "unit/test_compat_anthropic.py::test_anthropic_vision_base64_with_multimodal_model": VISION,
    "unit/test_security.py::test_local_media_file": VISION,
    **{
        f"unit/test_slot_save.py::test_slot_{name}": VISION
        for name in (
            "save_restore_with_image",
            "save_restore_with_two_images",
            "save_restore_with_image_across_restart",
            "save_restore_image_payload_larger_than_context",
            "restore_media_file_without_mmproj",
        )
    },
    "unit/test_rerank.py": "needs a model that ranks",
    "unit/test_lora.py": "needs an adapter made for the model",
    "unit/test_basic.py::test_load_split_model": "needs a model in several files",
    "unit/test_basic.py::test_no_ui": PAGE,
    "unit/test_security.py::test_access_static_assets_without_api_key": PAGE,
    "unit/test_proxy.py::test_mcp_proxy": "reads a page of the network",
    "unit/test_proxy.py::test_mcp_proxy_custom_port": "reads a page of the network",
    "unit/test_router.py::test_router_remote_preset": NETWORK,
    "unit/test_router.py::test_router_download_model": NETWORK,
    "unit/test_router.py::test_router_delete_model": NETWORK,
    "unit/test_tools_builtin.py::test_tools_builtin_runtime_header": CONTAINER,
    "unit/test_tools_builtin.py::test_tools_builtin_docker_runtime_cleans_up_spawned_container": (
        CONTAINER
    ),
}

# Left out where the draft replaces the test's own.
RATES = "gives rates for 8 drafted tokens, and the draft's block has 7"
OWN_DRAFT = {
    f"unit/test_speculative.py::test_synth_{name}": RATES
    for name in ("is_deterministic", "ignores_target_tokens")
}

HISTOGRAM = (
    "reads no histograms, and ours of tokens per round is one",
    "AssertionError: llamacpp:spec_decode_accepted_length_sum has no # TYPE line",
)
# Tests that pass with stock and not with ours -> why, and what their failure starts with.
EXPLAINED = {
    "unit/test_speculative.py::test_with_and_without_draft": (
        "compares sampled text with flash attention off, where one token and several round"
        " differently: with other seeds the stock server's texts differ too",
        "assert [",
    ),
    "unit/test_metrics.py::test_metrics_prometheus_format": HISTOGRAM,
    "unit/test_metrics.py::test_metrics_prompt_processed_and_cached": HISTOGRAM,
    "unit/test_metrics.py::test_metrics_predicted_total_matches_requests": HISTOGRAM,
    "unit/test_metrics.py::test_metrics_timings_are_finite[8]": (
        "takes all timings for numbers, and with a draft ours hold a word and lists",
        "TypeError: '>=' not supported",
    ),
}


@dataclass(frozen=True)
class Models:
    """The stand-ins: a cache of the hub, and the drafts by the tests' name of the target."""

    cache: Path
    drafts: dict[str, str]
    downloads: dict[str, str]


@dataclass(frozen=True)
class Done:
    """A finished run."""

    code: int
    output: str
    outcomes: dict[str, str]
    reasons: dict[str, str]
    counts: dict[str, int]

    def names(self, outcome: str) -> list[str]:
        """The tests that ended this way."""
        return [name for name, found in self.outcomes.items() if found == outcome]

    def said(self) -> str:
        """One line of counts."""
        tests = Counter(self.outcomes.values())
        told = ", ".join(f"{tests[name]} {name}" for name in ("passed", "failed", "skipped"))
        drafts = (
            "{with_draft} of {servers} servers with our draft, {accepted} of {drafted} accepted"
        )
        return f"{told}; {drafts.format(**self.counts)}"


@pytest.fixture(scope="module")
def unpacked(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tests, with what they read beside it, of the version that is built."""
    folder = tmp_path_factory.mktemp("base")
    unpack(root, folder, NEEDED)
    (folder / TESTS / "tmp").mkdir()  # they expect it
    return folder / TESTS


@pytest.fixture(scope="module")
def models(bin_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A constructed pair for most tests; the demo's pair for those that draft themselves."""
    folder = tmp_path_factory.mktemp("stand-ins")
    pair = make_bigram(folder / "pair", wrong=0.2, drift=0.28, dtype="f16", outtype="f16")

    def with_keys(name: str, keys: dict[str, int]) -> Path:
        out = folder / name
        options = [f"--override-kv={key}=int:{value}" for key, value in keys.items()]
        command = [bin_dir / "llama-quantize", *_split(options), pair.target, out, "COPY"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return out

    fim = {"pre": 5, "suf": 6, "mid": 7}
    infill = with_keys(
        "infill.gguf", {f"tokenizer.ggml.fim_{k}_token_id": v for k, v in fim.items()}
    )
    embedding = with_keys("embedding.gguf", {"llama.pooling_type": 1})
    demo = demo_pair.work_dir()
    large, _ = demo_pair.requantise(demo_pair.find_target(), "Q8_0", demo)
    draft, _ = demo_pair.convert_draft(demo_pair.find_checkpoint(), large, "q8_0", demo)

    cache = folder / "cache"
    put(cache, "ggml-org/test-model-stories260K", "stories260K-F32.gguf", pair.target)
    put(cache, "ggml-org/test-model-stories260K-infill", "stories260K-infill-F32.gguf", infill)
    put(cache, "ggml-org/tinygemma3-GGUF", "tinygemma3-Q8_0.gguf", pair.target)
    put(cache, "ggml-org/models", "bert-bge-small/ggml-model-f16.gguf", embedding)
    put(cache, "ggml-org/stories15M_MOE", "stories15M_MOE-F16.gguf", large)
    small = "https://huggingface.co/ggml-org/tiny-llamas/resolve/main/stories15M-q4_0.gguf"
    drafts = {
        "ggml-org/test-model-stories260K": str(pair.draft),
        "ggml-org/test-model-stories260K-infill": str(pair.draft),
        "ggml-org/stories15M_MOE": str(draft),
    }
    return Models(cache, drafts, {small: str(large)})


def _split(options: Iterable[str]) -> list[str]:
    return [part for option in options for part in option.split("=", 1)]


def put(cache: Path, repository: str, name: str, file: Path) -> None:
    """Let llama.cpp find `file` as `name` of a repository without asking the hub."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    link = folder / "snapshots" / COMMIT / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(file.resolve())
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(COMMIT)


def run_tests(
    unpacked: Path,
    models: Models,
    server: Path,
    folder: Path,
    *,
    drafts: str = "none",
    tests: Iterable[str] = ("unit",),
    left_out: dict[str, str] | None = None,
) -> Done:
    """Run tests with the plugin; `drafts` is none, added or replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    report, job = folder / "report.json", folder / "job.json"
    document = {
        "drafts": drafts,
        "draft_files": models.drafts,
        "downloads": models.downloads,
        "left_out": LEFT_OUT if left_out is None else left_out,
        "report": str(report),
    }
    job.write_text(json.dumps(document), encoding="utf-8")
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-p", "base_server_plugin", "-p", "no:cacheprovider",
            "-q", "--timeout=180", "--show-capture=no", "--tb=short", "-m", "not slow", *tests,
        ],
        cwd=unpacked,
        env={
            **os.environ,
            "BASE_SERVER_JOB": str(job),
            "LLAMA_CACHE": str(models.cache),
            "LLAMA_SERVER_BIN_PATH": str(server),
            "PORT": str(free_port()),
            "PYTHONPATH": str(Path(__file__).parent),
        },
        capture_output=True,
        text=True,
        errors="replace",
    )  # fmt: skip
    assert report.exists(), done.stdout + done.stderr
    written = json.loads(report.read_text(encoding="utf-8"))
    return Done(done.returncode, done.stdout + done.stderr, **written)


Run = Callable[..., Done]


@pytest.fixture(scope="module")
def stock(
    unpacked: Path,
    models: Models,
    stock_bin_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Done:
    """All tests with the stock server: which can pass with these models at all."""
    folder = tmp_path_factory.mktemp("stock")
    return run_tests(unpacked, models, stock_bin_dir / "llama-server", folder)


def test_what_is_compared(stock: Done, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\nllama.cpp's server tests, stock server: {stock.said()}")
        print(f"not run: {stock.counts['slow']} that llama.cpp marks slow: models of several GB")
        for title, outcome in (
            ("not run either", "skipped"),
            ("not compared, the stock server with these models fails too", "failed"),
        ):
            print(f"{title}:")
            for name in stock.names(outcome):
                print(f"  {name}: {stock.reasons[name][:120]}")
        files = Counter(name.split("::")[0] for name in stock.names("passed"))
        print("compared: " + ", ".join(f"{name} {n}" for name, n in files.items()))
    assert len(stock.names("passed")) >= 270, stock.output[-8000:]
    assert stock.counts["with_draft"] == 0


@pytest.mark.parametrize(
    ("drafts", "tests"),
    [("none", "unit"), ("added", "unit"), ("replaced", "unit/test_speculative.py")],
)
def test_what_passes_with_stock_passes_with_ours(
    stock: Done,
    unpacked: Path,
    models: Models,
    bin_dir: Path,
    stock_bin_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    drafts: str,
    tests: str,
) -> None:
    server = bin_dir / "llama-server"
    left_out = LEFT_OUT | (OWN_DRAFT if drafts == "replaced" else {})
    options = {"drafts": drafts, "tests": [tests], "left_out": left_out}
    ours = run_tests(unpacked, models, server, tmp_path / "1", **options)
    explained = [name for name in regressions(stock, ours) if is_explained(name, ours)]
    accounted = {*explained, *left_out}
    worse = [name for name in regressions(stock, ours) if name not in accounted]
    again, stock_again = ours, stock
    if worse:  # many tests wait for so long and no longer: a busy machine fails them now and then
        again = run_tests(
            unpacked, models, server, tmp_path / "2", drafts=drafts, tests=worse, left_out={}
        )
        program = stock_bin_dir / "llama-server"
        stock_again = run_tests(unpacked, models, program, tmp_path / "3", tests=worse, left_out={})
    with capsys.disabled():
        print(f"\nllama.cpp's server tests, our server, drafts {drafts}: {ours.said()}")
        other = [n for n in stock.names("failed") if n in ours.outcomes]
        same = [n for n in other if alike(stock.reasons[n], ours.reasons.get(n, ""))]
        print(f"of {len(other)} not compared, {len(same)} fail with the same words")
        for name in explained:
            print(f"  {name}: {EXPLAINED[name][0]}")
        for name in worse:
            told = f"{again.outcomes.get(name)}, stock {stock_again.outcomes.get(name)}"
            print(f"  {name}: {ours.reasons[name][:120]}; in a second try {told}")
    assert [name for name in worse if name in regressions(stock_again, again)] == [], again.output
    assert set(ours.outcomes) <= set(stock.outcomes)
    if drafts == "none":
        assert ours.counts["with_draft"] == 0
    else:
        assert ours.counts["with_draft"] > 0
        assert 0 < ours.counts["accepted"] < ours.counts["drafted"]


def is_explained(name: str, ours: Done) -> bool:
    """Whether a failure is one that is listed and explained."""
    return name in EXPLAINED and ours.reasons[name].startswith(EXPLAINED[name][1])


def alike(one: str, other: str) -> bool:
    """Whether two failures say the same, but for times and addresses."""
    first, second = (re.sub(r"\d+\.\d+|0x[0-9a-f]+", "#", text) for text in (one, other))
    return first == second


def regressions(stock: Done, ours: Done) -> list[str]:
    """Tests that pass with the stock server and do not with ours."""
    return [n for n in ours.outcomes if stock.outcomes.get(n) == "passed" != ours.outcomes[n]]


OTHER_UTILS = """
class ServerProcess:
    server_embeddings = server_reranking = False

    def __init__(self, repository, draft=None, kind=None):
        self.model_hf_repo, self.model_draft, self.spec_type = repository, draft, kind

    def start(self):
        self.started = self.model_draft, self.spec_type

    def make_request(self):
        raise NotImplementedError

    def make_stream_request(self):
        yield {"timings": {"draft_n": 3, "draft_n_accepted": 2}}


class ServerPreset:
    pass
"""
OTHER_TESTS = """
import pytest
import utils


@pytest.mark.parametrize("case", ["plain", "own", "other"])
def test_draft(case):
    own = ("own.gguf", "draft-simple") if case == "own" else ()
    server = utils.ServerProcess("a/b" if case != "other" else "c/d", *own)
    before = server.model_draft, server.spec_type
    server.start()
    assert (server.model_draft, server.spec_type) == before
    assert server.started == before, "got another draft"
    assert len(list(server.make_stream_request())) == 1


def test_download(tmp_path):
    import wget

    wget.download("https://example.invalid/x.gguf", str(tmp_path / "x.gguf"))
"""


@pytest.mark.parametrize(
    ("drafts", "with_ours"), [("none", []), ("added", ["plain"]), ("replaced", ["own"])]
)
def test_who_gets_a_draft(tmp_path: Path, drafts: str, with_ours: list[str]) -> None:
    (tmp_path / "utils.py").write_text(OTHER_UTILS)
    (tmp_path / "test_other.py").write_text(OTHER_TESTS)
    models = Models(tmp_path, {"a/b": "draft.gguf"}, {})
    left_out = {"test_other.py::test_draft[other]": "for a reason", "test_absent.py::test_x": "-"}
    tests = ["test_other.py"]
    done = run_tests(
        tmp_path, models, tmp_path, tmp_path, drafts=drafts, tests=tests, left_out=left_out
    )
    others = {f"test_other.py::test_draft[{case}]" for case in with_ours}
    assert set(done.names("failed")) == {*others, "test_other.py::test_download"}
    assert all("got another draft" in done.reasons[name] for name in others)
    assert "no file of this machine" in done.reasons["test_other.py::test_download"]
    assert done.reasons["test_other.py::test_draft[other]"] == "for a reason"
    assert done.counts["servers"] == 2
    assert done.counts["with_draft"] == len(others)
    assert done.counts["drafted"] == 3 * (2 - len(others))


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "utils.py").write_text(OTHER_UTILS)
    (tmp_path / "test_other.py").write_text(OTHER_TESTS)
    left_out = {"test_other.py::test_gone": "no longer there"}
    done = run_tests(
        tmp_path, Models(tmp_path, {}, {}), tmp_path, tmp_path, tests=["."], left_out=left_out
    )
    assert done.code == 4
    assert "there are no such tests" in done.output
