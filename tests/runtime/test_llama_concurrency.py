"""asyncio, threads, interrupted calls, the end of the process and forks.

What a call leaves behind, however it ends, must not change the next one.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from twins import SETTINGS, make_files, need_library, take

pytestmark = pytest.mark.native

PROMPT = list(range(20, 80))
TEXT = "the cat sat"
TOKENS = 40


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    need_library()
    return make_files(tmp_path_factory.mktemp("pair"), "llama")


@pytest.fixture
def open_llama(files: tuple[Path, Path]) -> Iterator[Callable[..., Any]]:
    from dflash_cpp import DFlashLlama

    opened: list[DFlashLlama] = []

    def open_one(**options: Any) -> DFlashLlama:
        opened.append(DFlashLlama(files[0], draft_path=files[1], **(SETTINGS | options)))
        return opened[-1]

    yield open_one
    for llm in opened:
        llm.close()


def complete(llm: Any, text: str = TEXT, **options: Any) -> str:
    options = {"max_tokens": TOKENS, "temperature": 0.0} | options
    return str(llm.create_completion(text, **options)["choices"][0]["text"])


# --- asyncio --------------------------------------------------------------------------------------


async def in_executor(pool: ThreadPoolExecutor, stream: Iterator[Any]) -> AsyncIterator[str]:
    """Pull every chunk of a stream in some thread of a pool."""
    loop = asyncio.get_running_loop()
    while (chunk := await loop.run_in_executor(pool, next, stream, None)) is not None:
        yield chunk["choices"][0]["text"]


def test_to_thread_keeps_the_loop_alive(open_llama: Any) -> None:
    llm = open_llama()
    expected = complete(llm, max_tokens=200)

    async def main() -> tuple[str, int]:
        answer = asyncio.create_task(asyncio.to_thread(complete, llm, max_tokens=200))
        turns = 0
        while not answer.done():
            await asyncio.sleep(0)
            turns += 1
        return await answer, turns

    text, turns = asyncio.run(main())
    assert text == expected
    assert turns > 20


def test_a_stream_in_an_executor(open_llama: Any) -> None:
    """Every chunk may come from another thread."""
    llm = open_llama()
    expected = complete(llm)

    async def main() -> str:
        stream = llm.create_completion(TEXT, max_tokens=TOKENS, temperature=0.0, stream=True)
        with ThreadPoolExecutor(3) as pool:
            return "".join([piece async for piece in in_executor(pool, stream)])

    assert asyncio.run(main()) == expected
    assert llm.last_stats.accepted > 0


def test_a_cancelled_stream(open_llama: Any) -> None:
    llm = open_llama()
    expected = complete(llm)

    async def main() -> None:
        stream = llm.create_completion("other", max_tokens=400, temperature=0.0, stream=True)
        with ThreadPoolExecutor(1) as pool:
            pieces = in_executor(pool, stream)
            await anext(pieces)
            await pieces.aclose()

    asyncio.run(main())
    assert complete(llm) == expected


def test_two_instances_give_the_texts_of_each_alone(open_llama: Any) -> None:
    """Other prompts, one greedy and one sampled, adaptive lengths on in one."""
    pair = [(open_llama(), TEXT, {}), (open_llama(), "one two", {"temperature": 1.0, "seed": 3})]
    alone = [complete(llm, text, **options) for llm, text, options in pair]

    async def main() -> list[list[str]]:
        async def several(llm: Any, text: str, options: dict[str, Any]) -> list[str]:
            return [await asyncio.to_thread(complete, llm, text, **options) for _ in range(4)]

        return await asyncio.gather(*(several(*one) for one in pair))

    assert asyncio.run(main()) == [[text] * 4 for text in alone]


# --- threads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_completions_of_one_instance_in_two_threads(open_llama: Any, streaming: bool) -> None:
    """Each ends with its own text or with the error."""
    from dflash_cpp import DFlashStateError

    llm = open_llama()
    texts = (TEXT, "one two three")
    expected = {text: complete(llm, text) for text in texts}
    outcomes: list[tuple[str, str]] = []

    def ask(text: str) -> str:
        if not streaming:
            return complete(llm, text)
        chunks = llm.create_completion(text, max_tokens=TOKENS, temperature=0.0, stream=True)
        return "".join(c["choices"][0]["text"] for c in chunks)

    def work(text: str) -> None:
        for _ in range(6):
            try:
                outcomes.append((ask(text), expected[text]))
            except DFlashStateError as exc:
                outcomes.append((str(exc)[:20], "another call has cha"))

    join(*(threading.Thread(target=work, args=(text,)) for text in texts))
    assert len(outcomes) == 12
    assert [found for found, wanted in outcomes if found != wanted] == []
    assert complete(llm) == expected[TEXT]


def join(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()


@pytest.mark.parametrize("speculate", [True, False])
def test_closing_while_another_thread_generates(open_llama: Any, speculate: bool) -> None:
    from dflash_cpp import DFlashStateError

    for delay in (0.0, 0.004, 0.009):
        llm = open_llama(speculate=speculate)
        began = threading.Event()
        ends: list[str] = []

        def work(llm: Any = llm, began: threading.Event = began, ends: list[str] = ends) -> None:
            try:
                while True:
                    for _ in llm.generate(PROMPT, temp=0.0):
                        began.set()
            except (DFlashStateError, RuntimeError) as exc:
                ends.append(str(exc))

        thread = threading.Thread(target=work)
        thread.start()
        assert began.wait(60)
        time.sleep(delay)  # at some point of a pass, not always the same
        llm.close()
        thread.join(60)
        assert len(ends) == 1
        assert "closed" in ends[0] or "context" in ends[0]


# --- calls that end early -------------------------------------------------------------------------


class PlannedError(Exception):
    """What the tests raise in the middle of a call."""


def abandon(llm: Any) -> None:
    generator = llm.generate(PROMPT, temp=0.0)
    for _ in range(9):
        next(generator)
    del generator


def keep_but_never_finish(llm: Any) -> None:
    generator = llm.generate(PROMPT, temp=0.0)
    next(generator)
    llm.kept = generator


def throw(llm: Any) -> None:
    generator = llm.generate(PROMPT, temp=0.0)
    for _ in range(5):
        next(generator)
    with pytest.raises(PlannedError):
        generator.throw(PlannedError())


def fail_in_stopping_criterion(llm: Any) -> None:
    def stop(ids: Any, scores: Any) -> bool:
        if len(ids) > len(PROMPT) + 12:
            raise PlannedError
        return False

    with pytest.raises(PlannedError):
        list(llm.generate(PROMPT, temp=0.0, stopping_criteria=stop))


def fail_in_logits_processor(llm: Any) -> None:
    """llama-cpp-python reports the exception and goes on without the processor."""
    ignored: list[Any] = []

    def process(ids: Any, scores: Any) -> Any:
        raise PlannedError

    from dflash_cpp._memory import llama_cpp

    hook, sys.unraisablehook = sys.unraisablehook, ignored.append
    try:
        processors = llama_cpp.LogitsProcessorList([process])
        take(llm, PROMPT, 5, temp=0.0, logits_processor=processors)
    finally:
        sys.unraisablehook = hook
    assert [one.exc_type for one in ignored] == [PlannedError] * 5


def fail_in_stream_consumer(llm: Any) -> None:
    def consume() -> None:
        for n, _ in enumerate(llm.create_completion(TEXT, max_tokens=90, seed=5, stream=True)):
            if n == 7:
                raise PlannedError

    with pytest.raises(PlannedError):
        consume()


def interrupt(llm: Any) -> None:
    """SIGINT while a token is made."""
    timer = threading.Timer(0.02, signal.raise_signal, [signal.SIGINT])

    def generate() -> None:
        timer.start()
        for _ in llm.generate(PROMPT, temp=0.0):
            pass
        timer.join()
        time.sleep(1.0)

    with pytest.raises(KeyboardInterrupt):
        generate()
    timer.join()


ENDINGS = (
    abandon, keep_but_never_finish, throw, fail_in_stopping_criterion, fail_in_logits_processor,
    fail_in_stream_consumer, interrupt,
)  # fmt: skip


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("ending", ENDINGS, ids=lambda f: f.__name__)
def test_a_call_that_ends_early_changes_nothing(
    open_llama: Any, ending: Callable[[Any], None], speculate: bool
) -> None:
    llm = open_llama(speculate=speculate)
    expected = take(llm, PROMPT, 60, temp=0.0), complete(llm)
    for _ in range(2):
        ending(llm)
        assert complete(llm) == expected[1]
        ending(llm)
        assert take(llm, PROMPT, 60, temp=0.0) == expected[0]
    assert (llm.last_stats.accepted > 0) == speculate


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers on this system")
@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_interrupts_anywhere_in_a_round(
    tmp_path: Path, arch: str, request: pytest.FixtureRequest
) -> None:
    """Between any two steps of the interpreter: the tokens of the next call are the right ones."""
    need_library()
    from dflash_cpp import DFlashLlama

    def raise_planned(number: int, frame: object) -> None:
        raise PlannedError

    target, draft = make_files(tmp_path, arch)
    before = signal.signal(signal.SIGALRM, raise_planned)
    request.addfinalizer(lambda: signal.signal(signal.SIGALRM, before))
    rng = random.Random(0)
    interrupted = 0
    with DFlashLlama(target, draft_path=draft, **SETTINGS) as llm:
        expected = take(llm, PROMPT, TOKENS, temp=0.0)
        began = time.perf_counter()
        take(llm, PROMPT, TOKENS, temp=0.0)
        seconds = time.perf_counter() - began
        for _ in range(40):
            try:
                signal.setitimer(signal.ITIMER_REAL, max(1e-4, rng.uniform(0.0, seconds)))
                take(llm, PROMPT, TOKENS, temp=0.0)
                signal.setitimer(signal.ITIMER_REAL, 0.0)
            except PlannedError:
                interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            assert take(llm, PROMPT, TOKENS, temp=0.0) == expected
    assert interrupted > 10


# --- processes ------------------------------------------------------------------------------------


def run_code(files: tuple[Path, Path], folder: Path, code: str, **settings: Any) -> Any:
    """Run code with an open `llm` in a process of its own."""
    need_library()
    opening = (
        "from dflash_cpp import DFlashLlama, DFlashStateError\n"
        f"llm = DFlashLlama({str(files[0])!r}, draft_path={str(files[1])!r}, "
        f"**{SETTINGS | settings!r})\n"
    )
    return subprocess.run(
        [sys.executable, "-c", opening + code],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("delay", [0.3, 0.31, 0.323, 0.337])
def test_the_process_ends_while_a_thread_generates(
    files: tuple[Path, Path], tmp_path: Path, speculate: bool, delay: float
) -> None:
    code = f"""
import threading, time
threading.excepthook = lambda args: None
def work():
    while True:
        for n, token in enumerate(llm.generate({PROMPT!r}, temp=0.0)):
            if n == 300:
                break
threading.Thread(target=work, daemon=True).start()
time.sleep({delay})
"""
    done = run_code(files, tmp_path, code, speculate=speculate)
    assert (done.returncode, done.stdout) == (0, "")
    assert "Fatal" not in done.stderr


FORK = """
import os, signal, sys
def child(work):
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        signal.alarm(60)
        try:
            print(work())
        except DFlashStateError as exc:
            print("error:", exc)
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
expected = llm("the cat sat", max_tokens=20, temperature=0)["choices"][0]["text"]
generator = llm.generate(list(range(20, 80)), temp=0.0)
for _ in range(3):
    next(generator)
"""
REFUSED = "error: this {} was opened by another process, expected one of this process\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize(
    ("call", "what"),
    [
        ('llm("the cat sat", max_tokens=20)', "DFlashLlama"),
        ("next(generator)", "DFlashLlama"),
        ("llm.tokenize(b'a')", "DFlashLlama"),
        ("setattr(llm, 'speculate', False)", "DFlashLlama"),
        ("llm._session.n_past", "session"),
        ("(llm.close(), llm.last_stats.emitted)[1]", None),
    ],
)
def test_use_after_a_fork(
    files: tuple[Path, Path], tmp_path: Path, n_threads: int, call: str, what: str | None
) -> None:
    """The child has none of the threads: it gets an error, and the parent goes on."""
    code = f"{FORK}\nchild(lambda: {call})\nprint(len([next(generator) for _ in range(9)]))"
    done = run_code(files, tmp_path, code, n_threads=n_threads, n_threads_batch=n_threads)
    first = REFUSED.format(what) if what else "3\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{first}9\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_while_another_thread_holds_the_lock(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    code = f"""{FORK}
import threading
stop = False
def work():
    while not stop:
        llm("the cat sat", max_tokens=20)
thread = threading.Thread(target=work)
thread.start()
for _ in range(5):
    child(lambda: llm("the cat sat", max_tokens=20))
stop = True
thread.join()
"""
    done = run_code(files, tmp_path, code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == 5 * REFUSED.format("DFlashLlama")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_copy_opens_the_pair_in_the_child(files: tuple[Path, Path], tmp_path: Path) -> None:
    opened = "copy.copy(llm)('the cat sat', max_tokens=20, temperature=0)['choices'][0]['text']"
    code = f"import copy\n{FORK}\nchild(lambda: {opened} == expected)"
    done = run_code(files, tmp_path, code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_a_hundred_cycles_hold_memory_steady(tmp_path: Path, arch: str) -> None:
    """Measured after a warm-up, in four steps of 25 cycles.

    Measured: 0.02 to 3.2 MB per step, the smallest of four 0.04 MB at most. A leak of 20 kB per
    cycle puts 0.5 MB into each step.
    """
    need_library()
    import psutil

    from dflash_cpp import DFlashLlama

    target, draft = make_files(tmp_path, arch)
    process = psutil.Process()

    def cycle() -> None:
        llm = DFlashLlama(target, draft_path=draft, **SETTINGS)
        take(llm, PROMPT, 8, temp=0.0)
        llm.close()

    for _ in range(20):
        cycle()
    sizes = [process.memory_info().rss]
    for _ in range(4):
        for _ in range(25):
            cycle()
        sizes.append(process.memory_info().rss)
    steps = [(b - a) / 1e6 for a, b in itertools.pairwise(sizes)]
    assert min(steps) < 0.5, steps
    assert sum(steps) < 8.0, steps
