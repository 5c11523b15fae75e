"""The body of a trace is ordinary Python: what capturing its source would break."""

from __future__ import annotations

import asyncio
import code
import contextlib
import threading

import pytest
import torch

from bridge import TransformerBridge
from tests.conftest import tiny, torch_hooks

TOKENS = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(1))
NAME = "blocks.1.hook_resid_post"


@pytest.fixture
def bridge():
    bridge = TransformerBridge(tiny("gpt2"))
    yield bridge
    assert not torch_hooks(bridge.original_model)


@pytest.fixture
def expected(bridge):
    with torch.no_grad():
        return bridge.run_with_cache(TOKENS, names_filter=NAME)[1][NAME]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def test_break(bridge, expected):
    for _ in range(3):
        with bridge.trace(TOKENS) as run:
            h = run[NAME]
            break
    assert torch.equal(h, expected)


def test_continue(bridge, expected):
    seen = []
    for _ in range(2):
        with bridge.trace(TOKENS) as run:
            seen.append(run[NAME])
            continue
    assert all(torch.equal(h, expected) for h in seen)


def test_return(bridge, expected):
    def first():
        with bridge.trace(TOKENS) as run:
            return run[NAME]

    assert torch.equal(first(), expected)


def test_try_as_the_first_statement(bridge, expected):
    with bridge.trace(TOKENS) as run:
        try:
            h = run[NAME]
            raise KeyError("mine")
        except KeyError:
            done = True
        finally:
            last = run["blocks.2.hook_resid_post"]
    assert done and torch.equal(h, expected) and last.shape == h.shape


def test_nested_functions_and_nonlocal(bridge, expected):
    count, found = 0, None
    with bridge.trace(TOKENS) as run:

        def read(name):
            nonlocal count, found
            count += 1
            found = run[name]
            return found

        assert torch.equal(read(NAME), expected)
    assert count == 1 and found is not None


def test_global(bridge, expected):
    global KEPT
    with bridge.trace(TOKENS) as run:
        KEPT = run[NAME]
    assert torch.equal(KEPT, expected)


def test_generator_around_it(bridge, expected):
    def activations():
        with bridge.trace(TOKENS) as run:
            for i in range(3):
                yield run[f"blocks.{i}.hook_resid_post"]

    assert torch.equal(list(activations())[1], expected)
    left = activations()
    next(left)
    left.close()


def test_one_line(bridge, expected):
    with bridge.trace(TOKENS) as run: h = run[NAME]  # fmt: skip  # noqa: E701
    assert torch.equal(h, expected)


def test_exec_and_a_console(bridge, expected):
    names = {"bridge": bridge, "TOKENS": TOKENS, "NAME": NAME}
    exec("with bridge.trace(TOKENS) as run:\n    h = run[NAME]", names)
    assert torch.equal(names["h"], expected)
    console = code.InteractiveConsole(names | {"h": None})
    for line in ("with bridge.trace(TOKENS) as run:", "    h = run[NAME]", "    k = h + 1", ""):
        more = console.push(line)
    assert not more and torch.equal(console.locals["h"], expected)


def test_line_by_line_as_in_a_notebook(bridge, expected):
    run = bridge.trace(TOKENS).__enter__()
    h = run[NAME]
    run.__exit__(None, None, None)
    assert torch.equal(h, expected)


def test_comprehension_lambda_and_walrus(bridge, expected):
    with bridge.trace(TOKENS) as run:
        read = lambda i: run[f"blocks.{i}.hook_resid_post"]
        norms = [h.norm() for i in range(3) if (h := read(i)) is not None]
    assert norms[1] == expected.norm()


def test_match_while_and_conditions_on_values(bridge, expected):
    with bridge.trace(TOKENS) as run:
        i = 0
        while True:
            h = run[f"blocks.{i}.hook_resid_post"]
            match i:
                case 1:
                    break
            if h.norm() > 0:
                i += 1
    assert torch.equal(h, expected)


def test_exit_stack_and_several_in_one_statement(bridge, expected):
    other = TransformerBridge(tiny("llama"))
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(bridge.trace(TOKENS))
        h = run[NAME]
    with bridge.trace(TOKENS) as one, other.trace(TOKENS) as two:
        a, b = one[NAME], two[NAME]
        two["blocks.2.hook_resid_pre"] = a * 0 + b
        assert torch.equal(bridge.blocks[2].output, one["blocks.2.hook_resid_post"])
        assert other.blocks[2].output.shape == a.shape
    assert torch.equal(h, expected) and torch.equal(a, expected)
    assert torch.equal(two.logits, other(TOKENS))


def test_decorator_and_method(bridge, expected):
    class Study:
        @contextlib.contextmanager
        def traced(self):
            with bridge.trace(TOKENS) as run:
                yield run

        def found(self):
            with self.traced() as run:
                self.h = run[NAME]
            return self.h

    assert torch.equal(Study().found(), expected)


def test_await_around_and_inside(bridge, expected):
    async def study(name):
        with bridge.trace(TOKENS) as run:
            await asyncio.sleep(0)
            h = run[name]
            await asyncio.sleep(0)
            return h, bridge.blocks[2].output

    async def all_of_them():
        return await asyncio.gather(study(NAME), study("blocks.0.hook_resid_post"), study(NAME))

    first, other, again = asyncio.run(all_of_them())
    assert torch.equal(first[0], expected) and torch.equal(again[0], expected)
    assert torch.equal(first[1], other[1]) and not torch.equal(other[0], expected)


def test_threads(bridge, expected):
    found = {}

    def work(i):
        own = bridge if i % 2 else TransformerBridge(bridge.original_model)
        with torch.no_grad(), own.trace(TOKENS) as run:
            found[i] = run[NAME]
            run["blocks.2.hook_mlp_out"] *= i

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and all(torch.equal(h, expected) for h in found.values())


def test_assertions_with_pytest_rewriting(bridge):
    with pytest.raises(AssertionError), bridge.trace(TOKENS) as run:
        assert run[NAME].norm() < 0


def test_a_debugger(bridge, expected):
    import pdb

    class Scripted(pdb.Pdb):
        def interaction(self, frame, *rest):
            if frame is not None and frame.f_code.co_name == "body":
                seen.append(frame.f_locals.get("h"))
            self.set_continue()

    seen = []

    def body():
        with bridge.trace(TOKENS) as run:
            h = run[NAME]
            debugger.set_trace()
            return h

    debugger = Scripted()
    body()
    debugger.set_quit()
    import sys

    sys.settrace(None)
    assert any(h is not None and torch.equal(h, expected) for h in seen)


def test_runs_and_traces_in_the_body(bridge, expected):
    with bridge.trace(TOKENS) as run:
        run["blocks.0.hook_mlp_out"] *= 0
        plain = bridge(TOKENS)
        with bridge.trace(TOKENS) as inner:
            assert torch.equal(inner[NAME], expected)
            with pytest.raises(RuntimeError, match="which of the 2 traces"):
                _ = bridge.blocks[2].output
        _, cache = bridge.run_with_cache(TOKENS)
        after = run[NAME]
    assert torch.equal(cache[NAME], expected) and not torch.equal(after, expected)
    assert torch.equal(plain, bridge(TOKENS)) and not torch.equal(run.logits, plain)
