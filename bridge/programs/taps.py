"""Places inside a forward in a program: one mode sees the torch functions that a module's own forward calls."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from adapters.views import Args, Call, Kwargs
from adapters.views.kernel_arguments import KernelArguments
from bridge.programs.one_pass import AnyFunction, OnePass, current
from bridge.programs.steps import Step
from bridge.taps.attention_call import AttentionCall, softmax_of, with_heads
from bridge.taps.kernels import implementation_of, is_looked_up
from bridge.taps.router import RouterSteps
from bridge.taps.tap import PRODUCTS, SOFTMAXES


class LoweredTap:
    """Stands for the forward of a shell.

    Args:
        module: the shell.
        steps: the hook points inside its forward, by channel.
        here: finds the pass that is under way.
    """

    def __init__(self, module: nn.Module, steps: Mapping[str, Sequence[Step]], here: threading.local) -> None:
        self.module, self.here = module, here
        self.steps = {channel: tuple(points) for channel, points in steps.items()}
        self.original = module.forward

    def stand(self) -> None:
        """Puts it in the place of the shell's forward."""
        self.module.__dict__["forward"] = self

    def show(self, channel: str, x: Tensor, call: Call, one_pass: OnePass) -> Tensor:
        """What the points of a channel make of a tensor."""
        for step in self.steps.get(channel, ()):
            x = step.apply(x, call, one_pass)
        return x

    def changes(self, *channels: str) -> bool:
        """Whether any point of these channels may change something."""
        return any(step.changes for channel in channels for step in self.steps.get(channel, ()))

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The module's forward."""
        raise NotImplementedError


class LoweredAttention(LoweredTap):
    """The attention of one module. Its channels are ``q``, ``k``, ``scores`` and ``pattern``.

    Args:
        module, steps, here: as for `LoweredTap`.

    Attributes:
        kernel_alone: only the kernel is looked at: a softmax or a product elsewhere in the module is another one.
    """

    def __init__(self, module: nn.Module, steps: Mapping[str, Sequence[Step]], here: threading.local) -> None:
        super().__init__(module, steps, here)
        self.kernel_alone = implementation_of(module) == "sdpa" and is_looked_up(type(module).forward, "sdpa")

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The module's forward."""
        one_pass = current(self.here)
        watch = AttentionWatch(self, Call(self.module, args, kwargs), one_pass)
        self.here.attention = watch
        try:
            with watch:
                output = self.original(*args, **kwargs)
        finally:
            self.here.attention = None
        watch.check()
        return output


class _Watch(TorchFunctionMode):
    """Sees the torch functions that a module calls while it runs, and not those of a user's function."""

    def __init__(self, tap: LoweredTap, call: Call, one_pass: OnePass) -> None:
        super().__init__()
        self.tap, self.the_call, self.one_pass = tap, call, one_pass

    def __torch_function__(
        self, func: AnyFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = {} if kwargs is None else kwargs
        if func is Tensor.unflatten:  # torch.compile cannot call this one as a function
            x, *sizes = args
            return x.unflatten(*sizes, **kwargs)
        if self.one_pass.asking:
            return func(*args, **kwargs)
        return self.watched(func, args, kwargs)

    def watched(self, func: AnyFunction, args: Args, kwargs: Kwargs) -> object:
        """Calls a function of the module's, or does something else in its place."""
        raise NotImplementedError

    def show(self, channel: str, x: Tensor) -> Tensor:
        """What the points of a channel make of a tensor."""
        return self.tap.show(channel, x, self.the_call, self.one_pass)


class AttentionWatch(_Watch):
    """Shows what one call of an attention module computes, as `bridge.taps.attention` does for a run."""

    def __init__(self, tap: LoweredAttention, call: Call, one_pass: OnePass) -> None:
        super().__init__(tap, call, one_pass)
        self.products = "q" in tap.steps or "k" in tap.steps
        self.inside = "scores" in tap.steps or "pattern" in tap.steps
        self.kernel_alone = tap.kernel_alone

    def watched(self, func: AnyFunction, args: Args, kwargs: Kwargs) -> object:
        """Shows what attention is computed from, and what it computes."""
        if func is scaled_dot_product_attention:
            return self.scaled_dot_product(*args, **kwargs)
        if self.kernel_alone:
            return func(*args, **kwargs)
        if self.inside and func in SOFTMAXES:
            self.inside = False
            scores, args = (args[0], args[1:]) if args else (kwargs.pop("input"), args)
            new = self.show("scores", scores)
            return self.show("pattern", softmax_of(new, scores, lambda x: func(x, *args, **kwargs)))
        if self.products and func in PRODUCTS and all(isinstance(x, Tensor) and x.ndim == 4 for x in args):
            query, key = self.rotated(args[0], args[1].transpose(-1, -2))
            return func(query, key.transpose(-1, -2), **kwargs)
        return func(*args, **kwargs)

    def check(self) -> None:
        """Looks whether everything was seen.

        Raises:
            RuntimeError: it was not.
        """
        if self.products or self.inside:
            names = ", ".join(step.hook.name for steps in self.tap.steps.values() for step in steps)
            raise RuntimeError(
                f"{type(self.tap.module).__name__} computed no scores that could be seen, so there is nothing to show "
                f'at {names}; load the model with attn_implementation="sdpa" or "eager"'
            )

    def scaled_dot_product(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The kernel, or what it computes in full where scores or pattern may be changed."""
        given = KernelArguments(query, key, value, *args, **kwargs)
        if self.products:
            query, key = self.rotated(query, key)
            given = given.with_products(query, key)
        if self.inside:
            self.inside = False
            call = AttentionCall.of_torch(given, self.n_heads(given.query))
            scores = call.scores()
            new = self.show("scores", scores)
            pattern = self.show("pattern", softmax_of(new, scores, call.pattern))
            if self.tap.changes("scores", "pattern"):
                return call.result(pattern)
        # By its place: an exporter puts a function of its own there, which its runtime can take.
        query, key, value, mask, dropped, causal, scale, grouped = given
        return functional.scaled_dot_product_attention(
            query, key, value, mask, dropped, causal, scale=scale, enable_gqa=grouped
        )

    def n_heads(self, query: Tensor) -> int:
        """How many query heads there are: a point says so, since a kernel may be given them packed."""
        for channel in ("scores", "pattern", "q"):
            for step in self.tap.steps.get(channel, ()):
                if step.hook.point.n_heads is not None:
                    return step.hook.point.n_heads
        return query.shape[1]

    def rotated(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Shows queries and keys, and returns what is made of them, with the heads as they were given."""
        self.products = False
        return self.with_heads("q", query), self.with_heads("k", key)

    def with_heads(self, channel: str, x: Tensor) -> Tensor:
        """What is made of queries or keys."""
        steps = self.tap.steps.get(channel, ())
        if not steps:
            return x
        return with_heads(x, steps[0].hook.point.n_heads, lambda shown: self.show(channel, shown))


class LoweredRouter(LoweredTap):
    """A router. Its channels are those of `bridge.taps.router`."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The module's forward."""
        watch = _RouterWatch(self, Call(self.module, args, kwargs), current(self.here))
        with watch:
            output: object = self.original(*args, **kwargs)
        return watch.router.with_weights(output) if "weights" in self.steps else output


class _RouterWatch(_Watch):
    """Shows what one call of a router computes."""

    def __init__(self, tap: LoweredTap, call: Call, one_pass: OnePass) -> None:
        super().__init__(tap, call, one_pass)
        self.router = RouterSteps(self.show)

    def watched(self, func: AnyFunction, args: Args, kwargs: Kwargs) -> object:
        """Shows the router's product and its choice."""
        return self.router.call(func, args, kwargs)
