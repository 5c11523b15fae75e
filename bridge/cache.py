"""`ActivationCache`: the activations of one run, by hook name.

Input: what a recorder kept, tensors by canonical name, and deferred activations (patterns, head
results, norm scales) that are computed on access. Output: a mapping that accepts every name and
alias, and methods that decompose the residual stream, which `bridge/analysis` implements on names
alone.

A cache records the run it was opened for and nothing later. Deferred activations are computed with
the weights of the run: if these were written to since, an error names them. The cache does not
depend on hooks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adapters.tuners import depends_on_call
from adapters.views import Deferred
from adapters.views.basis import InBasis
from adapters.views.values import fingerprints, is_readable
from bridge.analysis.analysis import Index, MissingActivationsError, Plain, pick, plain
from bridge.analysis.residual import ResidualMethods
from bridge.arguments import refuse_wrong_types, shown, without_batch_axis
from bridge.hooks.context import NamedPoint
from bridge.hooks.names import act_name, suggestion
from bridge.hooks.parts import KeptHeads, entries_of, picked
from bridge.hooks.studied_bridge import StudiedBridge
from bridge.modules import ModuleState, state_of
from bridge.rows import token_axis


def _without_tuple(what: str, index: Index) -> Plain:
    if isinstance(index, tuple):
        raise TypeError(
            f"{what} is {index}: give {list(index)} for those, or slice{index} for a range"
        )
    return plain(index)


@dataclass(frozen=True)
class _Names:
    """The facts about its model that a pickled cache keeps: axes, aliases, the number of layers."""

    axes: dict[str, str]
    aliases: dict[str, str]
    n_layers: int | None


#: Hook points whose activations are multiplied by weights when terms, heads or neurons are read.
_READ_BY_WEIGHTS = (".attn.hook_z", ".attn.hook_result", ".mlp.hook_post", ".hook_scale")
#: Hook points at weights that begin a stream or compute logits; they need not be cached themselves.
_ENDS = ("hook_full_embed", "ln_final.hook_scale", "unembed.hook_in")

#: Axes of heads, queries and keys: in deferred scores and patterns, the first two are axes 1 and 2.
_PART_AXES = {
    "heads": ("n_heads", "n_key_value_heads"),
    "queries": ("pos", "decoder_pos"),
    "keys": ("key_pos", "decoder_key_pos"),
}
#: What caches of TransformerLens have in addition, and the replacement.
_ELSEWHERE = {
    "compute_ssm_effective_attention": (
        "the hook points of the mixer show what it computes (docs/hook_points.md)"
    ),
    "compute_ssm_state": "the hook points of the mixer show what it computes (docs/hook_points.md)",
    "logit_lens": "bridge.lens(tokens), or unembed(ln_final(...)) of accumulated_resid",
    "ssm_layers": "bridge.blocks_with('mixer')",
}


@functools.lru_cache(maxsize=10_000)
def _read_by_weights(name: str) -> str | None:
    """Return the hook point itself, or the one whose activation its module reads; None if no
    weights are applied to the activation."""
    base = name.rpartition(".")[0]  # for an activation in a user-defined basis
    for point in (name, base):
        if point.endswith((*_READ_BY_WEIGHTS, *_ENDS)):
            return point
    return None


def _weights_behind(
    values: Mapping[str, Any], model: StudiedBridge | None
) -> dict[str, ModuleState]:
    """Return the state of the weights that may be applied to activations, by hook point."""
    if model is None:
        return {}
    hooks = model.hook_dict
    names = dict.fromkeys([*map(_read_by_weights, values), *_ENDS])
    states: dict[str, ModuleState] = {}
    for name in names:
        if name in hooks and (weights := hooks[name].weights) is not None:
            states[name] = state_of(weights.module)
    return states


def _bases_of(
    values: Mapping[str, Any], model: StudiedBridge | None
) -> dict[str, tuple[object, ...]]:
    """Return the bases that cached features are in, and their states, by name."""
    hooks = {} if model is None else model.hook_dict
    views = {name: hooks[name].view for name in values if name in hooks}
    return {name: _basis_state(view) for name, view in views.items() if isinstance(view, InBasis)}


def _basis_state(view: InBasis) -> tuple[object, ...]:
    """Return a basis, and fingerprints of the tensors that it computes with."""
    owners = [getattr(x, "__self__", x) for x in (view.basis.encode, view.basis.decode)]
    modules = dict.fromkeys(x for x in owners if isinstance(x, nn.Module))
    tensors = [x for module in modules for x in (*module.parameters(), *module.buffers())]
    return (view.basis, *[known for x in tensors for known in fingerprints(x)])


def _memory_of(x: Tensor) -> int:
    """Return the address of a tensor's memory; views of a tensor share it."""
    return x.untyped_storage().data_ptr() if is_readable(x) else 0


def _alone(value: Tensor) -> Tensor:
    """Copy a view of a larger tensor, so that the rest of that tensor is not pickled as well."""
    size = value.numel() * value.element_size()
    return value.clone() if value.untyped_storage().nbytes() > size else value


class ActivationCache(ResidualMethods):
    """The activations of one run, by any name of their hook points.

    Keys are canonical hook names; aliases and short forms are accepted: ``cache["q", 3]``,
    ``cache["embed"]``, ``cache["resid_post", -1]``, ``cache["scale", 0, "ln1"]`` (see `act_name`).

    Args:
        cache_dict: activations by canonical name, with a leading batch axis if the run had one.
        model: the bridge that produced them, or an object that forwards to it; its names and facts
            are used. None: only canonical names are accepted. A pickled cache holds its activations
            and their names, not the model: for analyses, assign `model` after loading.
        has_batch_dim: False where the batch axis was removed.

    Example:
        >>> from bridge import TransformerBridge
        >>> bridge = TransformerBridge.boot_embedded()
        >>> logits, cache = bridge.run_with_cache("Mary and John")
        >>> cache["pattern", 0].shape == cache["blocks.0.attn.hook_pattern"].shape
        True
    """

    #: Whether each row was run with adapters of its own (PEFT).
    mixes_adapters = False
    #: What is padding in the run's rows, ``[row, token]``, by the name of the axis of tokens.
    masks: Mapping[str, Tensor] = MappingProxyType({})
    #: The heads of partially cached hook points, by canonical name.
    kept_heads: Mapping[str, KeptHeads] = MappingProxyType({})

    @refuse_wrong_types
    def __init__(
        self, cache_dict: dict[str, Any], model: StudiedBridge | None, has_batch_dim: bool = True
    ) -> None:
        self._fill(cache_dict, model, has_batch_dim)

    def _fill(
        self, values: dict[str, Any], model: StudiedBridge | None, has_batch_dim: bool
    ) -> None:
        self._values = values  # tensors, and functions that compute one on access (`Deferred`)
        self._waiting: dict[int, list[Deferred]] | None = None  # by the memory that they need
        self._model = model
        self._names: _Names | None = None
        self._weights = _weights_behind(values, model)
        self._bases = _bases_of(values, model)
        self.has_batch_dim = has_batch_dim

    @property
    def model(self) -> StudiedBridge:
        """Return the bridge that produced the activations; assign one after loading a pickled
        cache.

        Raises:
            ValueError: there is none.
        """
        if self._model is None:
            raise ValueError(
                "this cache has no model (it was pickled, or made without one): for analyses,"
                " assign the bridge that made it (cache.model = bridge)"
            )
        return self._model

    @model.setter
    def model(self, model: StudiedBridge) -> None:
        self._model = model
        self._weights = _weights_behind(self._values, model)
        self._bases = _bases_of(self._values, model)

    def check_basis(self, name: str) -> None:
        """Check that a basis decodes the cached features as it did in the run.

        Args:
            name: of the hook point in the basis.

        Raises:
            ValueError: its weights were changed since, or another basis has its name.
        """
        then = self._bases.get(name)
        if then is None:
            return
        view = self.model.hook_dict[name].view
        if isinstance(view, InBasis) and _basis_state(view) != then:
            raise ValueError(
                f"the basis at {name} was changed since the run (trained, written to, or replaced):"
                " what it made then of these features cannot be computed any more. Run again"
            )

    def module_of_the_run(self, name: str) -> nn.Module:
        """Return the module whose weights are applied to an activation, if they are unchanged.

        Heads are computed from ``hook_z``, neurons from ``hook_post``, normalised terms with
        ``hook_scale``, logits from the end of the stream.

        Args:
            name: of the hook point.

        Raises:
            ValueError: since the run, its weights were changed, the module was replaced, or its
                PEFT adapters were switched; or rows had different adapters.
        """
        weights = self.model.hook_dict[name].weights
        assert weights is not None
        module = weights.module
        then = self._weights.get(name)
        if self.mixes_adapters and hasattr(module, "base_layer"):
            raise ValueError(
                "each row of this run had adapters of its own (adapter_names=), and the weights at"
                f" {name} are not theirs: cache hook_result in the run for what heads write, or run"
                " rows of one adapter, which set_adapter chooses"
            )
        if needed := depends_on_call(module):
            raise ValueError(
                f"what the weights at {name} made in the run depends on its call ({needed}), so it"
                " cannot be computed from this cache: cache hook_result in the run, or"
                " hook_attn_out and hook_mlp_out"
            )
        if then is not None and state_of(module) != then:
            raise ValueError(
                f"the weights at {name} were changed since the run (processed, trained, written to,"
                " or adapters switched): what they made then of terms, heads, neurons or logits"
                " cannot be computed any more. Take it before, cache hook_result in the run, or"
                " run again"
            )
        return module

    def mask_of(self, name: str) -> Tensor | None:
        """Return the mask of an activation, ``[batch, pos]``: 0 where rows were padded; None if
        none was, or it has no axis of tokens.

        Args:
            name: of the hook point.

        Raises:
            ValueError: its axes are others, or the cache holds some of the rows or positions only.
        """
        padded = {axis: mask for axis, mask in self.masks.items() if not bool(mask.all())}
        if not padded:
            return None
        canonical = self._canonical(name)
        axes = (self._axes(canonical.removesuffix("_grad")) or "").split()
        of_tokens = [axis for axis in axes if token_axis(axis) in padded]
        if not of_tokens:
            return None
        mask, shape = padded[token_axis(of_tokens[0])], self[canonical].shape
        if of_tokens != axes[1:2] or shape[:2] != mask.shape:
            raise ValueError(
                f"the rows of this cache are padded, and {canonical} {list(shape)} does not have"
                f" the axes [batch, pos] of its mask {list(mask.shape)}: use rows of one length"
            )
        return mask

    @property
    def cache_dict(self) -> dict[str, Tensor]:
        """Return all activations by canonical name; deferred ones are computed now."""
        for name, value in self._values.items():
            if isinstance(value, Deferred):
                self._values[name] = value.value(name)
        return self._values

    @cache_dict.setter
    def cache_dict(self, activations: dict[str, Tensor]) -> None:
        self._values, self._waiting = activations, None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own questions
            raise AttributeError(name)
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # it is there, and says itself what it lacks
        if name in _ELSEWHERE:
            hint = f" Use {_ELSEWHERE[name]}"
        elif (layer := self._first_layer_with(name)) is not None:
            hint = f' Use cache["{name.removeprefix("hook_")}", layer], from layer {layer} on'
        elif name[0] != "_" and name in self:
            hint = f" Use cache[{name!r}]"
        else:
            public = [attribute for attribute in dir(type(self)) if attribute[0] != "_"]
            hint = suggestion(name, public)
        raise AttributeError(f"an {type(self).__name__} has no {name!r}.{hint}")

    def _first_layer_with(self, name: str) -> int | None:
        """Return the first layer whose activation of a short name the cache holds."""
        if name[0] == "_" or "_values" not in self.__dict__:
            return None
        n_layers = self._known().n_layers or 0
        short = name.removeprefix("hook_")
        return next((layer for layer in range(n_layers) if act_name(short, layer) in self), None)

    def __getstate__(self) -> dict[str, Any]:
        values = {name: _alone(value) for name, value in self.cache_dict.items()}
        ours = {
            "_values": values,
            "_model": None,
            "_names": self._known(),
            "_weights": {},
            "_bases": {},
            "_waiting": {},
        }
        return self.__dict__ | ours

    def __copy__(self) -> Self:
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        new = copy.copy(self)  # of the same model
        new.cache_dict = copy.deepcopy(self.cache_dict, memo)
        return new

    def _known(self) -> _Names:
        if self._model is None:
            return self._names or _Names({}, {}, None)
        axes = {name: hook.point.axes for name, hook in self._model.hook_dict.items()}
        return _Names(axes, dict(self._model.names.aliases), self._model.cfg.n_layers)

    def _alias(self, name: str) -> str:
        """Return the canonical name of an alias, or any other name unchanged."""
        aliases = self._model.names.aliases if self._model is not None else self._known().aliases
        return aliases.get(name, name)

    def _axes(self, name: str) -> str | None:
        """Return the axes of a hook point by its canonical name; None if it does not exist."""
        if self._model is None:
            return self._known().axes.get(name)
        hook = self._model.hook_dict.get(name)
        return None if hook is None else hook.point.axes

    def __repr__(self) -> str:
        first = ", ".join(list(self._values)[:4])
        return f"ActivationCache with {len(self)} activations: {first}, ..."

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __contains__(self, key: object) -> bool:
        if type(key) is str:  # most names are canonical
            if key in self._values:
                return True
            if self._model is not None and key in self._model.hook_dict:
                return False
        if not isinstance(key, str | tuple | NamedPoint):
            return False
        return self._canonical(key) in self._values

    def __getitem__(self, key: str | tuple[Any, ...] | NamedPoint) -> Tensor:
        name = key if type(key) is str and key in self._values else self._canonical(key)
        value = self._values.get(name)
        if isinstance(value, Deferred):
            value = self._values[name] = value.value(name)
        if value is None:
            raise self._missing(name)
        self._note_values_behind(value)
        return value

    def _missing(self, name: str) -> MissingActivationsError:
        """Return the error for a name that is not in the cache."""
        reason = "no hook point has this name"
        if self._axes(name.removesuffix("_grad")) is not None:
            reason = "it was not asked for, or did not run"
        kept = self.kept_heads.get(name)
        if kept is not None:
            reason = (
                f"it holds the heads {list(kept.heads)} alone: cache.part({name!r},"
                f" heads={kept.heads[0]})"
            )
        return MissingActivationsError(
            f"{name!r} is not in the cache: {reason}.{suggestion(name, self._values)}"
        )

    def _note_values_behind(self, handed_out: Tensor) -> None:
        """Record the values of a tensor that deferred activations need, before it is handed to the
        user."""
        if self._waiting is None:
            self._waiting = {}
            for value in self._values.values():
                for x in value.tensors() if isinstance(value, Deferred) else ():
                    self._waiting.setdefault(_memory_of(x), []).append(value)
        if self._waiting:
            for deferred in self._waiting.pop(_memory_of(handed_out), ()):
                deferred.note_values()

    @refuse_wrong_types
    def part(
        self,
        name: str,
        layer: int | None = None,
        *,
        heads: Index = None,
        queries: Index = None,
        keys: Index = None,
    ) -> Float[Tensor, "..."]:
        """Return some heads, queries or keys of scores or a pattern, computing only these if it is
        deferred.

        A cache holds queries and keys until a pattern is read. One head of a long prompt then takes
        the time and memory of one head; ``cache["pattern", layer]`` takes that of all heads.

        Args:
            name: the hook point, such as ``pattern``, or any activation with these axes.
            layer: its layer, if the name does not include it. heads, queries, keys: an index (which
                removes the axis), a slice, or a list; None: all. (Tuples are not accepted:
                elsewhere in this library they mean a range in some places and a list in others.)

        Raises:
            MissingActivationsError: the cache does not hold it, or holds other heads.
            ValueError: the activation has no such axis.
            IndexError: there are no such heads, queries or keys, or none are chosen.
            TypeError: an index is not an integer, a list of integers, or a slice.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> _, cache = bridge.run_with_cache("Mary and John")
            >>> (
            ...     cache.part("pattern", 2, heads=3).shape,
            ...     cache.part("pattern", 2, heads=[0, 3], queries=-1).shape,
            ... )
            (torch.Size([1, 4, 4]), torch.Size([1, 2, 4]))
        """
        full = self._canonical(name if layer is None else (name, layer))
        choices = self._choices(full, {"heads": heads, "queries": queries, "keys": keys})
        kept = self.kept_heads.get(full)
        if kept is not None and full not in self._values:
            axis = kept.axis - (not self.has_batch_dim)
            _, chosen = choices.get(axis, ("heads", None))
            places = kept.within(chosen)
            choices[axis] = "heads", places[0] if isinstance(chosen, int) else places
            full = kept.name
        stored = self._values.get(full)
        computed = None
        if isinstance(stored, Deferred):
            _, chosen_heads = choices.get(1, ("heads", None))
            _, chosen_queries = choices.get(2, ("queries", None))
            computed = stored.part(full, chosen_heads, chosen_queries)
        value = self[full] if computed is None else computed
        for axis, (what, chosen) in sorted(choices.items(), reverse=True):
            if computed is None or axis > 2:
                entries = entries_of(what, chosen, value.shape[axis], full)
                value = picked(value, {axis: torch.tensor(entries, device="cpu")})
            if isinstance(chosen, int):
                value = value.select(axis, 0)
        return value

    def _choices(self, name: str, indices: Mapping[str, Index]) -> dict[int, tuple[str, Plain]]:
        """Return the index along each axis of an activation.

        Args:
            name: its canonical name.
            indices: the chosen heads, queries and keys; None: all.

        Raises:
            ValueError: the activation has no such axis, or its axes are not known.
        """
        axes = (self._axes(name.removesuffix("_grad")) or "").split()
        if not self.has_batch_dim:
            axes = axes[1:]
        choices: dict[int, tuple[str, Plain]] = {}
        for what, index in indices.items():
            if index is None:
                continue
            if not axes:
                raise ValueError(
                    f"which axes {name} has is not known here: assign the model (cache.model ="
                    " bridge)"
                )
            numbers = [i for i, axis in enumerate(axes) if axis in _PART_AXES[what]]
            if what == "heads":  # if a layer has its own number of heads
                numbers += [i for i, axis in enumerate(axes[:-1]) if axis.isdigit()]
            if not numbers:
                raise ValueError(
                    f"{name} has the axes [{' '.join(axes)}], and no {what} among them"
                )
            choices[numbers[0]] = what, _without_tuple(what, index)
        return choices

    def _canonical(self, key: str | tuple[Any, ...] | NamedPoint) -> str:
        if isinstance(key, NamedPoint):
            return key.name
        if not isinstance(key, str | tuple) or not key:
            raise TypeError(
                f"the key is {shown(key)}; it must be a name, such as 'blocks.0.hook_resid_pre', or"
                " a short one and a layer, such as ('resid_pre', 0)"
            )
        if isinstance(key, tuple):
            name, layer, *part = key if len(key) > 1 else (*key, None)
            if hasattr(layer, "__index__") and layer < 0:
                known = None if self._names is None else self._names.n_layers
                layer += self.model.cfg.n_layers if known is None else known
            key = act_name(name, layer, *part)
        if key in self._values:
            return key
        name, grad = (key[:-5], "_grad") if key.endswith("_grad") else (key, "")
        full = self._alias(name)
        if "." not in full and self._axes(full) is None:
            full = self._alias(act_name(full))
        return full + grad

    def _has_rows(self, name: str) -> bool:
        """Tell whether an activation's first axis is not the batch, as in an expert's rows."""
        axes = self._axes(name.removesuffix("_grad"))
        return axes is not None and not axes.startswith("batch")

    def remove_batch_dim(self) -> ActivationCache:
        """Remove the batch axis of a run on one prompt, in place.

        Raises:
            ValueError: the batch holds more than one.

        Example:
            >>> from bridge import TransformerBridge
            >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
            >>> cache.remove_batch_dim()["resid_pre", 0].shape
            torch.Size([3, 128])
        """
        if self.has_batch_dim:
            self.cache_dict |= {
                name: without_batch_axis(value, name)
                for name, value in self.cache_dict.items()
                if not self._has_rows(name)
            }
            self.has_batch_dim = False
        return self

    @refuse_wrong_types
    def apply_slice_to_batch_dim(self, batch_slice: Index) -> ActivationCache:
        """Return a cache of some rows of the batch.

        Args:
            batch_slice: an index (which removes the batch axis), a tuple ``(start, stop)``, or a
                list of indices.

        Returns:
            A new cache, with views of the activations where that is possible.

        Raises:
            ValueError: the batch axis was removed; or an activation has none (an expert's rows).

        Example:
            >>> from bridge import TransformerBridge
            >>> _, cache = TransformerBridge.boot_embedded().run_with_cache(
            ...     ["Mary and", "John and", "Anna and"]
            ... )
            >>> cache.apply_slice_to_batch_dim([0, 2])["resid_pre", 0].shape
            torch.Size([2, 3, 128])
        """
        if not self.has_batch_dim:
            raise ValueError("the batch axis was removed: there is nothing to slice")
        index = plain(batch_slice)
        for name in self._values:
            if self._has_rows(name) and index is not None:
                raise ValueError(
                    f"{name} has rows of the whole batch together: cache without it to slice the"
                    " batch"
                )
        kept = {name: pick(value, index, 0) for name, value in self.cache_dict.items()}
        new = copy.copy(self)
        new.cache_dict = kept
        new.has_batch_dim = not isinstance(index, int)
        return new

    @refuse_wrong_types
    def toggle_autodiff(self, mode: bool = False) -> None:
        """Turn gradients on or off for the whole thread (`torch.set_grad_enabled`).

        Args:
            mode: whether they are recorded.

        Example:
            >>> import torch
            >>> from bridge import TransformerBridge
            >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
            >>> cache.toggle_autodiff(True)
            >>> torch.is_grad_enabled()
            True
        """
        torch.set_grad_enabled(mode)

    @refuse_wrong_types
    def to(self, device: torch.device | str, move_model: bool = False) -> ActivationCache:
        """Move the activations, in place.

        Copies to an accelerator, or between two, are queued, and the call returns before they are
        done: later reads on the device are queued after them. For copies to the CPU, the call waits
        once, until all of them are done, because a reader on the CPU would not wait.

        Args:
            device: the target device.
            move_model: move the model too.
        """
        target = torch.device(device)
        sources = {value.device for value in self.cache_dict.values()} - {target}
        self.cache_dict = {
            name: value.to(target, non_blocking=True) for name, value in self.cache_dict.items()
        }
        if target.type == "cpu":
            for source in sources:
                if source.type != "cpu":
                    torch.accelerator.synchronize(source)
        if move_model:
            self.model.original_model.to(target)
        return self


def cache_of_run(values: dict[str, Any], model: StudiedBridge) -> ActivationCache:
    """Return the cache of a run: tensors by canonical name, and functions for deferred ones."""
    new = ActivationCache.__new__(ActivationCache)
    new._fill(values, model, True)
    return new
