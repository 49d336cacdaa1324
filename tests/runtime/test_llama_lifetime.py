"""Opening, refusing, plain decoding with its reason, closing, threads, processes."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from twins import SETTINGS, answer, make_files, need_library, take

pytestmark = pytest.mark.native

PROMPT = list(range(20, 80))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    need_library()
    return make_files(tmp_path_factory.mktemp("pair"), "llama")


@pytest.fixture
def open_llama(files: tuple[Path, Path]) -> Iterator[Any]:
    from dflash_cpp import DFlashLlama

    opened = []

    def open_one(**options: Any) -> Any:
        arguments = {"model_path": files[0], "draft_path": files[1]} | SETTINGS | options
        opened.append(DFlashLlama(arguments.pop("model_path"), **arguments))
        return opened[-1]

    yield open_one
    for llm in opened:
        llm.close()


# --- what is refused ------------------------------------------------------------------------------


def test_unknown_keyword(open_llama: Any) -> None:
    with pytest.raises(TypeError, match="'n_gpu_layer'; did you mean 'n_gpu_layers'"):
        open_llama(n_gpu_layer=3)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'colour'$"):
        open_llama(colour="blue")


def test_every_keyword_of_llama_is_known() -> None:
    need_library()
    from dflash_cpp._memory import llama_cpp
    from dflash_cpp._options import check_keywords
    from dflash_cpp.llama import _LLAMA_KEYWORDS

    parameters = inspect.signature(llama_cpp.Llama.__init__).parameters
    names = [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert len(names) > 40
    check_keywords(dict.fromkeys(names), _LLAMA_KEYWORDS)


@pytest.mark.parametrize("kind", ["path", "llama", "callable", "true"])
def test_draft_model_is_refused(open_llama: Any, files: tuple[Path, Path], kind: str) -> None:
    values = {"path": str(files[1]), "llama": object(), "callable": len, "true": True}
    with pytest.raises(TypeError, match="draft_path="):
        open_llama(draft_model=values[kind])
    assert open_llama(draft_model=None).speculate


def test_draft_path_is_needed(files: tuple[Path, Path], open_llama: Any) -> None:
    from dflash_cpp import DFlashLlama

    with pytest.raises(TypeError, match="draft_path"):
        DFlashLlama(files[0], verbose=False)  # type: ignore[call-arg]
    for wrong in (None, 3, object()):
        with pytest.raises(TypeError, match=r"draft_path is \w+, expected the path of a GGUF"):
            open_llama(draft_path=wrong)
    with pytest.raises(TypeError, match="model_path is NoneType"):
        open_llama(model_path=None)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"n_draft": 0}, "DFlashArgumentError", "n_draft is 0, expected 1 to 63"),
        ({"n_draft": 64}, "DFlashArgumentError", "n_draft is 64, expected 1 to 63"),
        ({"n_draft": 8}, "DFlashArgumentError", "n_draft is 8, this draft proposes 1 to 7"),
        ({"n_draft": True}, "TypeError", "n_draft is True, expected a whole number"),
        ({"n_draft": 2.5}, "TypeError", "n_draft is 2.5, expected a whole number"),
        ({"p_min": 1.5}, "DFlashArgumentError", "p_min is 1.5, expected a number from 0 to 1"),
        ({"p_min": float("nan")}, "DFlashArgumentError", "p_min is nan"),
        ({"p_min": "x"}, "TypeError", "p_min is 'x'"),
        ({"verify": "luck"}, "DFlashArgumentError", "verify is `luck`, expected one of `auto`"),
        ({"verify": None}, "DFlashArgumentError", "verify is `None`, expected one of `auto`"),
        ({"n_batch": 1, "n_ubatch": 1}, "DFlashTargetError", "speculation needs at least 2"),
    ],
)
def test_numbers(open_llama: Any, options: dict[str, Any], error: str, says: str) -> None:
    from dflash_cpp import errors

    kind = TypeError if error == "TypeError" else getattr(errors, error)
    with pytest.raises(kind) as caught:
        open_llama(**options)
    assert says in str(caught.value)


def test_pair_problems(open_llama: Any, files: tuple[Path, Path], tmp_path: Path) -> None:
    from dflash_cpp import DFlashFileError, DFlashPairError

    # swapped
    with pytest.raises(DFlashPairError) as caught:
        open_llama(model_path=files[1], draft_path=files[0])
    assert caught.value.reasons
    assert all(isinstance(reason, str) and reason for reason in caught.value.reasons)
    assert pickle.loads(pickle.dumps(caught.value)).reasons == caught.value.reasons
    # a target in place of the draft
    with pytest.raises(DFlashPairError, match="dflash"):
        open_llama(draft_path=files[0])
    # a draft for a target of another shape and vocabulary: both are reported
    import tiny

    other = tiny.make_target(tmp_path / "other.gguf", n_embd=192, n_vocab=400)
    with pytest.raises(DFlashPairError) as caught:
        open_llama(model_path=other)
    assert len(caught.value.reasons) >= 2
    # missing, empty, cut short
    for name in ("model_path", "draft_path"):
        with pytest.raises(DFlashFileError, match=r"none\.gguf"):
            open_llama(**{name: tmp_path / "none.gguf"})
    damaged = tmp_path / "damaged.gguf"
    for data in (b"", b"GGUF", b"not a model", files[1].read_bytes()[:500]):
        damaged.write_bytes(data)
        with pytest.raises(DFlashFileError, match=r"damaged\.gguf"):
            open_llama(draft_path=damaged)


def test_weights_cut_short(open_llama: Any, files: tuple[Path, Path], tmp_path: Path) -> None:
    """A header that is fine does not make the file fine; what was loaded is freed again."""
    from dflash_cpp import DFlashError

    damaged = tmp_path / "damaged.gguf"
    data = files[1].read_bytes()
    damaged.write_bytes(data[: len(data) - 5000])
    with pytest.raises(DFlashError):
        open_llama(draft_path=damaged)


def test_unusual_file_names(open_llama: Any, files: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = tmp_path / "ziel ünïcode 目标.gguf", tmp_path / "a b'c\".gguf"
    shutil.copy(files[0], target)
    shutil.copy(files[1], draft)
    llm = open_llama(model_path=str(target), draft_path=str(draft))
    assert take(llm, PROMPT, 5, temp=0.0)


# --- plain decoding -------------------------------------------------------------------------------


def _identity(ids: Any, scores: Any) -> Any:
    return scores


@pytest.mark.parametrize(
    ("opening", "asking", "reason"),
    [
        ({"speculate": False}, {}, "speculate is False"),
        ({"logits_all": True}, {"logprobs": 2}, "logits_all=True keeps"),
        ({}, {"logits_processor": [_identity]}, "logits processor"),
        ({}, {"logit_bias": {30: 5.0, 31: -100.0}}, "logit_bias"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_plain_says_why(
    files: tuple[Path, Path],
    open_llama: Any,
    opening: dict[str, Any],
    asking: dict[str, Any],
    reason: str,
    stream: bool,
) -> None:
    from dflash_cpp._memory import llama_cpp

    asking = {"max_tokens": 12, "temperature": 0.6, "seed": 4, "stream": stream} | asking
    if "logits_processor" in asking:
        asking["logits_processor"] = llama_cpp.LogitsProcessorList(asking["logits_processor"])
    llm = open_llama(**opening)
    own = {k: v for k, v in opening.items() if k != "speculate"}
    plain = llama_cpp.Llama(str(files[0]), **SETTINGS, **own)
    assert answer(llm.create_completion(PROMPT, **asking)) == answer(
        plain.create_completion(PROMPT, **asking)
    )
    stats = llm.last_stats
    assert stats.mode == "plain"
    assert reason in stats.reason
    assert (stats.drafted, stats.rounds, stats.emitted) == (0, 0, 12)
    assert llm.last_token_drafted is False
    assert stats.to_json()["draft_n"] is None
    plain.close()


def test_draft_follows_plain_calls(open_llama: Any) -> None:
    """A call with a logits processor leaves a draft that knows the text."""
    llm = open_llama()
    from dflash_cpp._memory import llama_cpp

    processors = llama_cpp.LogitsProcessorList([_identity])
    text = take(llm, PROMPT, 20, temp=0.0, logits_processor=processors)
    assert llm.last_stats.mode == "plain"
    take(llm, PROMPT + text, 60, temp=0.0)
    stats = llm.last_stats
    assert stats.mode == "draft-dflash"
    assert stats.reason is None
    assert stats.prompt_tokens == 1
    assert stats.accepted > 10


def test_embeddings_and_vocab_only(files: tuple[Path, Path], open_llama: Any) -> None:
    from dflash_cpp._memory import llama_cpp

    llm = open_llama(embedding=True)
    plain = llama_cpp.Llama(str(files[0]), **SETTINGS, embedding=True)
    assert llm.embed("the fox") == plain.embed("the fox")
    assert llm.n_draft is None
    plain.close()
    words = open_llama(vocab_only=True)
    assert words.detokenize(words.tokenize(b"the fox", add_bos=False)) == b"the fox"


def test_any_target_opens_where_no_draft_is_used(
    files: tuple[Path, Path], open_llama: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A bare vocabulary or an embedding model fits no draft, and needs none."""
    from dflash_cpp import DFlashPairError

    other = make_files(tmp_path_factory.mktemp("other"), "qwen3")[0]
    with pytest.raises(DFlashPairError):
        open_llama(model_path=other, draft_path=files[0])
    for option in ("vocab_only", "embedding", "logits_all"):
        assert open_llama(model_path=other, draft_path=files[0], **{option: True}).n_draft is None


def test_plain_is_said_once(
    open_llama: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    llm = open_llama(verbose=True, speculate=False)
    for _ in range(3):
        take(llm, PROMPT, 2)
    said = [r.getMessage() for r in caplog.records if r.name == "dflash"]
    assert said == ["decoding plainly: speculate is False"]


@pytest.mark.parametrize("arch", ["llama", "gemma4"])  # the base warns about windowed layers
def test_silent(
    open_llama: Any,
    files: tuple[Path, Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    arch: str,
) -> None:
    from dflash_cpp._memory import llama_cpp

    if arch != "llama":
        files = make_files(tmp_path, arch)
    llm = open_llama(model_path=files[0], draft_path=files[1])
    llm.create_completion("the fox", max_tokens=20)
    llm.create_completion("the fox", max_tokens=5, logit_bias={3: 1.0})
    llm.speculate = False
    llm.speculate = True
    llm.load_state(llm.save_state())
    llm.create_completion("the fox", max_tokens=5, stream=False)
    llm.close()
    assert capfd.readouterr() == ("", "")
    assert llama_cpp is not None


def test_stats_json(open_llama: Any) -> None:
    llm = open_llama()
    assert llm.last_stats is None
    generator = llm.generate(PROMPT, temp=0.0)
    for _ in range(30):
        next(generator)
    running = llm.last_stats
    assert running.emitted == 30
    assert running.rounds > 0
    generator.close()
    stats = llm.last_stats
    assert stats is llm.last_stats
    json = stats.to_json()
    assert json["draft_n"] == stats.drafted
    assert json["draft_n_accepted"] == stats.accepted
    assert json["prompt_n"] == len(PROMPT)
    assert json["predicted_n"] == 29
    assert json["predicted_per_second"] == pytest.approx(29e3 / json["predicted_ms"])
    assert sum(json["draft_n_accepted_per_pos"]) == stats.accepted
    parts = stats.draft_ms + stats.verify_ms + stats.sample_ms
    assert 0 < parts <= stats.total_ms
    assert 0 < stats.prompt_ms < stats.total_ms
    llm.close()
    assert llm.last_stats is stats


def test_generation_time_excludes_the_caller(open_llama: Any) -> None:
    import time

    llm = open_llama()
    started = time.perf_counter()
    for count, _ in enumerate(llm.generate(PROMPT, temp=0.0)):
        time.sleep(0.02)
        if count == 20:
            break
    gc.collect()
    wall = 1e3 * (time.perf_counter() - started)
    assert llm.last_stats.total_ms < wall - 20 * 20


# --- closing --------------------------------------------------------------------------------------


def test_closed(open_llama: Any) -> None:
    from dflash_cpp import DFlashStateError

    llm = open_llama()
    generator = llm.generate(PROMPT, temp=0.0)
    for _ in range(4):
        next(generator)
    session, state = llm._session, llm.save_state()
    with llm:
        pass
    llm.close()
    assert session.closed
    calls = [
        lambda: next(generator),
        lambda: llm.create_completion("a", max_tokens=1),
        lambda: next(llm.generate(PROMPT)),
        lambda: llm.eval([1]),
        lambda: llm.sample(),
        lambda: llm.reset(),
        lambda: llm.save_state(),
        lambda: llm.load_state(state),
        lambda: llm.tokenize(b"a"),
        lambda: llm.detokenize([1]),
        lambda: llm.embed("a"),
        lambda: setattr(llm, "speculate", True),
        lambda: session.n_past,
        lambda: session.prompt([1]),
        lambda: session.rollback(0),
        lambda: session.stats(),
    ]
    for call in calls:
        with pytest.raises(DFlashStateError, match=r"closed, expected an open one"):
            call()
    generator.close()
    session.close()


def test_target_closes_the_session_first(files: tuple[Path, Path]) -> None:
    """A session on a plain `Llama`, in whatever order things go."""
    need_library()
    from dflash_cpp import DFlashArgumentError, Session
    from dflash_cpp._memory import llama_cpp

    target = llama_cpp.Llama(str(files[0]), **SETTINGS)
    session = Session(target, files[1])
    session.prompt(PROMPT)
    target.close()
    assert session.closed
    with pytest.raises(DFlashArgumentError, match="the target has been closed"):
        Session(target, files[1])

    target = llama_cpp.Llama(str(files[0]), **SETTINGS)
    with Session(target, files[1], n_draft=3) as session:
        assert (session.n_draft, session.block_size) == (3, 8)
        session.prompt(PROMPT)
        assert session.n_past == len(PROMPT)
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_greedy())
        result = session.step(chain, 30)
        assert len(result.tokens) == result.n_accepted + 1 <= 4
        with pytest.raises(DFlashArgumentError, match="without trace"):
            session.trace()
        with pytest.raises(DFlashArgumentError, match="cannot keep"):
            session.rollback(10_000)
        with pytest.raises(DFlashArgumentError, match="not an id of the vocabulary"):
            session.prompt([10_000_000])
        llama_cpp.llama_sampler_free(chain)
    target.close()


def test_garbage(open_llama: Any, files: tuple[Path, Path]) -> None:
    """Dropping the last reference frees everything, also out of a cycle."""
    import weakref

    from dflash_cpp import DFlashLlama

    llm = DFlashLlama(files[0], draft_path=files[1], **SETTINGS)
    session = llm._session
    gone = weakref.ref(llm)
    del llm
    assert gone() is None
    assert session.closed

    llm = DFlashLlama(files[0], draft_path=files[1], **SETTINGS)
    llm.myself = llm
    session, gone = llm._session, weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    assert session.closed


def test_many_cycles_hold_memory(files: tuple[Path, Path]) -> None:
    need_library()
    import psutil

    from dflash_cpp import DFlashLlama

    process = psutil.Process()

    def cycle() -> None:
        llm = DFlashLlama(files[0], draft_path=files[1], **SETTINGS)
        take(llm, PROMPT, 8, temp=0.0)
        llm.close()

    for _ in range(5):
        cycle()
    before = process.memory_info().rss
    for _ in range(25):
        cycle()
    # the pair has 20 MB of weights and buffers: one leak per cycle would show as 500 MB
    assert process.memory_info().rss - before < 60e6


def test_failed_opening_leaves_nothing(files: tuple[Path, Path], open_llama: Any) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({"n_draft": 8}, {"colour": 1}, {"draft_path": "none.gguf"}):
            with pytest.raises((TypeError, ValueError)):
                open_llama(**options)
            gc.collect()


def test_pickle_and_copy(open_llama: Any) -> None:
    llm = open_llama(n_draft=4)
    expected = take(llm, PROMPT, 20, temp=0.0)
    for clone in (pickle.loads(pickle.dumps(llm)), copy.copy(llm)):
        assert clone.n_draft == 4
        assert take(clone, PROMPT, 20, temp=0.0) == expected
        clone.close()


# --- threads and processes ------------------------------------------------------------------------


def test_two_instances_in_two_threads(open_llama: Any) -> None:
    expected = take(open_llama(), PROMPT, 80, temp=0.0)
    found: dict[int, list[int]] = {}

    def work(number: int) -> None:
        llm = open_llama()
        for _ in range(3):
            found[number] = take(llm, PROMPT, 80, temp=0.0)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert list(found.values()) == [expected, expected]


@pytest.fixture
def switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("n_threads", [2, 4])
def test_one_instance_in_several_threads(
    open_llama: Any, switch_often: None, n_threads: int
) -> None:
    """Each call ends with the right text or with the error, never with another text."""
    from dflash_cpp import DFlashStateError

    llm = open_llama()
    expected = take(llm, PROMPT, 40, temp=0.0)
    outcomes: list[Any] = []

    def work() -> None:
        for _ in range(5):
            try:
                outcomes.append(take(llm, PROMPT, 40, temp=0.0))
            except DFlashStateError as exc:
                outcomes.append(str(exc))

    threads = [threading.Thread(target=work) for _ in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert len(outcomes) == 5 * n_threads
    for outcome in outcomes:
        assert outcome == expected or "another call has changed the context" in outcome
    assert take(llm, PROMPT, 40, temp=0.0) == expected


@pytest.mark.parametrize(
    "ending",
    ["", "llm.close()", "del llm", "import os; pid = os.fork(); pid and os.waitpid(pid, 0)"],
)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_end_of_the_process(files: tuple[Path, Path], tmp_path: Path, ending: str) -> None:
    need_library()
    code = f"""
from dflash_cpp import DFlashLlama
llm = DFlashLlama({str(files[0])!r}, draft_path={str(files[1])!r}, **{SETTINGS!r})
generator = llm.generate({PROMPT!r}, temp=0.0)
for _ in range(3):
    next(generator)
{ending}
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
