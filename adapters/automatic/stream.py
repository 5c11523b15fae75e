"""The residual sums of a block: its ordered steps, each a sum of module outputs with factors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from adapters.automatic.blocks import FoundStack
from adapters.automatic.parts import Addend, Norms, Parts, Sum, Value, values_in
from adapters.block import Mix, MixElement
from adapters.observe.observe import BorderTensor, ModuleCall, NotFound, Recording, mark
from adapters.observe.operations import (
    SAME,
    Node,
    behind,
    factor,
    is_operation,
    not_followed,
    operands,
    parameter,
)
from adapters.observe.recognised import agree
from adapters.views import Affine, Chain, times


@dataclass
class _Addends:
    """The addends collected on the walk from the end of one sum to the stream before it.

    Attributes:
        terms: the addends, in the order of the computation.
        chain: the factors on everything collected from here on, the stream included.
        once: `chain` and the added parameters, which are attributed only to the earliest addend.
        steps: the operations that were walked through.
    """

    terms: list[Addend] = field(default_factory=list)
    chain: Chain = ()
    once: Chain = ()
    steps: int = 0


class Sums(Parts):
    """The residual sums of a block with a single stream.

    They are read off autograd's graph of the run, from the block's output back to its input. A
    walk goes through additions, factors and norms on the stream. At each addition one operand
    carries the stream and is followed; the others are explained by module outputs.

    Args:
        block, recording, norms: as for `Parts`.
        output: the block's output.
    """

    def __init__(
        self, block: ModuleCall, output: BorderTensor, recording: Recording, norms: Norms
    ) -> None:
        assert block.entered is not None
        super().__init__(block, recording, norms)
        self.values = values_in(block, recording)
        self.x = self.values[block.entered.mark]
        self.y = self.values.get(output.mark) or Value(
            output.value.double().flatten(), output.mark, time=block.end
        )
        self.start = behind(block.entered.node)
        self.end = output.node
        self.parameters = {p.data_ptr(): name for name, p in block.module.named_parameters()}
        #: The values by the operations that made them, and by those behind the inputs of modules.
        self.produced: dict[Node, Value] = {}
        self.entered: dict[Node, Value] = {}
        #: Values that a module is given without a graph.
        self.detached: list[Value] = []
        for value in self.values.values():
            self._index(value)
        # A module that returns its input (an identity) does not take part in the computation.
        self.normed = {
            norm.returned.node: norm
            for norm in norms
            if norm.entered and norm.entered.node is not norm.returned.node
        }
        self._carry: dict[Node, bool] = {}

    def _index(self, value: Value) -> None:
        """Store a value by its operations."""
        for _, tensor in value.producers:
            if tensor.node:
                self.produced[tensor.node] = value
        inputs = [call.entered for call in value.readers if call.entered]
        for tensor in inputs:
            self.entered[behind(tensor.node)] = value
        if value is not self.x and not all(tensor.node for tensor in inputs):
            self.detached.append(value)

    def find(self) -> bool:
        """Find the sums in the order of the computation.

        Raises:
            NotFound: a custom autograd function is between the block's output and its input.
        """
        if self._carries(self.end):
            self.sums = self._leading_to(self.end, self.y, self.block.end) or []
        elif name := not_followed(self.end, self.start):
            raise NotFound(
                f"what leaves {self.block.path} is computed by {name}, whose graph cannot be"
                " followed"
            )
        else:
            self.sums = self._new_stream()
        return bool(self.sums)

    def _carries(self, node: Node) -> bool:
        """Tell whether a tensor is the block's input after additions, factors or norms."""
        if node is None:
            return False
        if node not in self._carry:
            carries = behind(node) is self.start
            self._carry[node] = carries or any(map(self._carries, self._stream_operands(node)))
        return self._carry[node]

    def _stream_operands(self, node: Node) -> list[Node]:
        """List the operands that may carry the stream through an operation."""
        norm = self.normed.get(node)
        if norm and norm.entered:
            return [norm.entered.node]
        if is_operation(node, *SAME, "Add", "Sub"):
            return operands(node)
        product = factor(node, self.parameters)
        return [product[0]] if product else []

    def _leading_to(self, node: Node, after: Value, end: int) -> list[Sum] | None:
        """Return the sums that lead to a stream, the earliest first.

        Args:
            node: the operation that made the stream.
            after: the stream.
            end: when the last sum ends.

        Returns:
            None if an addend is not a module's output.
        """
        addends = _Addends()
        while True:
            norm = self.normed.get(node)
            if norm and norm.entered and self._carries(norm.entered.node):
                return self._behind_norm(norm, after, addends, end)
            if behind(node) is self.start:
                if not addends.terms:
                    return None
                return [self._sum(self.x, after, addends, self.block.start, end)]
            state = self.entered.get(behind(node)) or self._detached_state(after, addends)
            if addends.terms and state and state is not self.y:
                earlier = self._leading_to(node, state, state.time)
                if not earlier:
                    return None
                return [*earlier, self._sum(state, after, addends, state.time, end)]
            if not self._collect(node, addends):
                return None
            node = self._next_on_stream(node)

    def _detached_state(self, after: Value, addends: _Addends) -> Value | None:
        """Return the stream before the addends where the model cuts its graph there.

        A module that receives a detached tensor has no autograd node, so the values are compared.
        """
        if not addends.terms or addends.once:
            return None
        terms = torch.stack([term.value.x for term in addends.terms])
        before = after.x - terms.sum(0)
        for value in self.detached:
            if value.time >= after.time and after is not self.y:
                continue
            if agree(before, value.x, after.x):
                return value
        return None

    def _behind_norm(
        self, norm: ModuleCall, after: Value, addends: _Addends, end: int
    ) -> list[Sum] | None:
        """Return the sums that lead through a norm on the stream to `after`."""
        assert norm.entered is not None
        earlier: list[Sum] = []
        if behind(norm.entered.node) is self.start:
            self.norm = norm
        else:
            entered = self.values[norm.entered.mark]
            earlier = self._leading_to(norm.entered.node, entered, norm.start) or []
            if not earlier:
                return None
            earlier[-1] = replace(earlier[-1], norm=norm)
        if addends.steps == 0:  # the block's output is the norm's
            return earlier
        before = self.values[norm.returned.mark]
        return [*earlier, self._sum(before, after, addends, norm.end, end)]

    def _collect(self, node: Node, addends: _Addends) -> bool:
        """Collect what an operation adds to the stream or multiplies it by.

        Returns:
            False if it adds something that is neither a parameter nor a module's output.
        """
        addends.steps += 1
        if product := factor(node, self.parameters):
            addends.chain = (*product[1], *addends.chain)
            addends.once = (*product[1], *addends.once)
            return True
        others = operands(node)
        others.remove(self._next_on_stream(node))
        for other in others:
            name = parameter(other, self.parameters)
            if name is not None:
                addends.once = (Affine(plus=name), *addends.once)
                continue
            terms = self._terms(other, addends.once)
            if terms is None:
                return False
            addends.terms = [*terms, *addends.terms]
            addends.once = addends.chain
        return True

    def _next_on_stream(self, node: Node) -> Node:
        """Return the operand of an operation that carries the stream."""
        return next(filter(self._carries, self._stream_operands(node)))

    def _sum(self, before: Value, after: Value, addends: _Addends, start: int, end: int) -> Sum:
        """Make one sum, its terms in the order of the computation.

        Terms that were computed before the sum begins come last.
        """

        def order(term: Addend) -> tuple[bool, int]:
            end = term.value.producer.end
            return end <= start, end

        terms = sorted(addends.terms, key=order)
        sum_module = None
        if addends.once and terms:
            mark_of_first = terms[0].value.mark
            calls = (call for call, _ in after.producers if call.reads(mark_of_first))
            sum_module = next(calls, None)
        return Sum(
            before,
            after,
            tuple(terms),
            start,
            end,
            residual_transform=addends.once,
            sum_module=sum_module,
        )

    def _new_stream(self) -> list[Sum]:
        """Return one sum without the block's input as a term, or an empty list.

        A module that returns the block's output itself explains nothing.
        """
        terms = self._terms(self.end, ()) or []
        if not terms:
            return []
        if any(term.value.mark == self.y.mark for term in terms):
            return []
        addends = _Addends(terms, once=times(0.0))
        return [self._sum(self.x, self.y, addends, self.block.start, self.block.end)]

    def _terms(self, node: Node, chain: Chain) -> list[Addend] | None:
        """Explain a tensor as a sum of module outputs.

        Args:
            node: the operation that made it.
            chain: the transform applied to the tensor afterwards.

        Returns:
            None if it is not such a sum.
        """
        value = self.produced.get(node)
        if product := factor(behind(node), self.parameters):
            factors = self._terms(product[0], (*product[1], *chain))
            if factors and self._is_apart(value, factors):
                return factors
        if value is not None:
            return [Addend(value, chain)]
        if not is_operation(node, *SAME, "Add", "Sub"):
            return None
        outputs: list[Node] = []
        for operand in operands(node):
            name = parameter(operand, self.parameters)
            if name is None:
                outputs.append(operand)
            else:
                chain = (Affine(plus=name), *chain)
        terms: list[Addend] = []
        for operand in outputs:
            addends = self._terms(operand, chain)
            if addends is None:
                return None
            terms += addends
        return terms

    def _is_apart(self, value: Value | None, inner: Sequence[Addend]) -> bool:
        """Tell whether a factor is not computed by the module whose output the product is.

        It is computed by the block itself, or by a module that does nothing else (LayerScale), or
        it multiplies the output of the module's last layer (Falcon-H1's MLP).
        """
        if value is None:
            return True
        call = value.producer
        if not any(parameter.ndim > 1 for parameter in call.module.parameters()):
            return True
        if call.is_leaf or len(inner) > 1:
            return False
        return inner[0].value.producer.is_linear


# --------------------------------------------------------------------------------------------------
# Mixes of several streams: each part reads a weighted sum of them, and its output is added to each
# with a weight.
# --------------------------------------------------------------------------------------------------


def with_streams(stack: FoundStack, recording: Recording) -> FoundStack:
    """Return the list of blocks with the number of streams that it carries.

    If the block's input has an axis of streams, the number is the length of that axis. If streams
    are concatenated in the last axis, it is derived from the outputs of a module that reads them.

    Args:
        stack: the list of blocks.
        recording: the recording of the run.
    """
    shape = stack.stream.value.shape
    if len(shape) == 4:
        return replace(stack, n_streams=shape[2])
    block = stack.blocks[0]
    output = stack.outputs[0]
    for n in _numbers(block, recording):
        if Mixed(block, output, recording, {}, n).find():
            return replace(stack, n_streams=n)
    return stack


def _numbers(block: ModuleCall, recording: Recording) -> Iterator[int]:
    """Yield the possible numbers of streams in a block's input."""
    assert block.entered is not None
    batch, pos, width = block.entered.value.shape
    for call in recording.between(block.start, block.end):
        if not call.reads(block.entered.mark):
            continue
        if call.n_outputs < 2:
            continue
        shapes = [tuple(output.value.shape) for output in call.outputs]
        for *rows, n in shapes:
            if rows == [batch, pos] and 1 < n < width and (batch, pos, width // n) in shapes:
                yield n


def first_of(stack: FoundStack) -> ModuleCall:
    """Return the call of the first block. If it carries several identical streams, its input is
    replaced by one of them.
    """
    block = stack.blocks[0]
    if stack.n_streams is None:
        return block
    if block.entered is None:
        return block
    streams = _apart(block.entered.value, stack.n_streams)
    first = streams[:, :, 0].contiguous()
    if not torch.equal(streams, first.unsqueeze(2).expand_as(streams)):
        return block
    return replace(block, entered=BorderTensor(None, block.entered.live, first, mark(first)))


def collapse(recording: Recording, stack: FoundStack) -> tuple[BorderTensor, str | None]:
    """Return the stream after the last block. If there are several, return the one computed from
    them, and the module that computes it.

    Args:
        recording: the recording of the run.
        stack: the list of blocks.

    Returns:
        The stream, and the path of the module that combines several streams, or None.
    """
    last = stack.outputs[-1]
    if stack.n_streams is None:
        return last, None
    shape = (*stack.stream.value.shape[:2], stack.d_model)
    for call in recording.after(stack.blocks[-1].end):
        output = call.only_output
        if output and call.reads(last.mark) and output.value.shape == shape:
            return output, call.path
    return last, None


def _apart(x: Tensor, n_streams: int) -> Tensor:
    """Return streams as ``[batch, pos, stream, d_model]``, splitting them if they are concatenated
    in the last axis.
    """
    if x.ndim == 4:
        return x
    return x.unflatten(-1, (n_streams, -1))


class Mixed(Parts):
    """The residual sums of a block that carries several streams: the `Value` of all streams is
    ``[batch, pos, stream, d_model]``.

    Args:
        block, output, recording, norms: as for `Sums`.
        n_streams: the number of streams.
    """

    def __init__(
        self,
        block: ModuleCall,
        output: BorderTensor,
        recording: Recording,
        norms: Norms,
        n_streams: int,
    ) -> None:
        assert block.entered is not None
        super().__init__(block, recording, norms)
        self.n = n_streams
        streams = block.entered.value
        first = replace(block.entered, value=_apart(streams, n_streams)[:, :, 0])
        # Tensors of the shape of one stream.
        self.values = values_in(replace(block, entered=first), recording)
        self.values.pop(block.entered.mark, None)
        self.x = self._state(block.entered, block.start)
        self.y = self._state(output, block.end)
        self.states = self._states(streams)

    def _state(self, tensor: BorderTensor, time: int) -> Value:
        return Value(_apart(tensor.value, self.n).double(), tensor.mark, time=time)

    def _states(self, streams: Tensor) -> list[Value]:
        """Return candidates for the streams between two steps: inputs of modules, and the block's
        output.
        """
        states = {self.x.mark: self.x}
        for call in sorted(self.inside, key=lambda call: call.start):
            if call.entered and call.entered.value.shape == streams.shape:
                states.setdefault(call.entered.mark, self._state(call.entered, call.start))
        states.setdefault(self.y.mark, self.y)
        del states[self.x.mark]
        return list(states.values())

    def find(self) -> bool:
        """Find the sums in the order of the computation."""
        now = self.x
        while now.mark != self.y.mark:
            step = self._next(now)
            if step is None:
                return False
            total, now = step
            self.sums.append(total)
        return bool(self.sums)

    def _next(self, now: Value) -> tuple[Sum, Value] | None:
        """Return the next sum from a state of the streams, and the state after it."""
        for call in self.inside:
            if not call.reads(now.mark):
                continue
            if call.start < now.time:
                continue
            if call.n_outputs < 2:
                continue
            mix = self._mix(call)
            if mix is None:
                continue
            before = self.values[call.element(mix.read).mark]
            for state in self.states:
                value = self._written(now, state, call, mix)
                if value is not None:
                    after = replace(state, x=state.x.flatten())
                    terms = (Addend(value),)
                    return Sum(before, after, terms, call.end, state.time, mix=mix), state
        return None

    def _mix(self, call: ModuleCall) -> Mix | None:
        """Return the mix that a module computes from the streams: a part's input, and weights."""
        batch, pos, n, width = self.x.x.shape
        shapes: dict[tuple[int, ...], MixElement] = {
            (batch, pos, width): "read",
            (batch, pos, n): "write",
            (batch, pos, n, n): "keep",
        }
        last = {tuple(output.value.shape): output.key for output in call.outputs}
        names: dict[int, MixElement] = {}
        for shape, key in last.items():
            if shape in shapes and key is not None:
                names[key] = shapes[shape]
        if not {"read", "write"} <= {*names.values()}:
            return None
        return Mix(call.path, tuple(names.get(i, "") for i in range(max(names) + 1)))

    def _written(self, now: Value, state: Value, call: ModuleCall, mix: Mix) -> Value | None:
        """Return the part's output that leads from one state of the streams to the next; None if
        there is none.
        """
        weights = call.element(mix.write).value
        write = weights.double()
        keep = None
        if mix.keep is not None:
            keep = call.element(mix.keep).value.double()
        for value in self.values.values():
            if not value.producers:
                continue
            if not call.end < value.producer.end <= state.time:
                continue
            x = value.x.view(*now.x.shape[:2], -1)
            if agree(mix.of(now.x, x, write, keep), state.x, weights):
                return value
        return None
