"""`ActivationCache`: the activations of one run, by hook name.

What comes in is what a recorder kept: tensors by canonical name, and for some (patterns, results of heads, norm scales)
what will compute them when they are asked for. What goes out is a mapping that takes every name and alias, and the
methods that take the residual stream apart, which `bridge/analysis` computes from names alone.

A cache records the run it was opened for and nothing later. What it computes late, it computes with the weights that
the run had: where they were written to since, it refuses, by name. It knows nothing of hooks.
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

from adapters.points import Point, module_at
from adapters.views import Deferred
from bridge.analysis.analysis import Index, MissingActivationsError, Plain, pick, plain
from bridge.analysis.layer_outputs import path_of_norm
from bridge.analysis.residual import ResidualMethods
from bridge.hooks.arguments import refuse_wrong_types, shown, without_batch_axis
from bridge.hooks.asked import StudiedBridge
from bridge.hooks.modules import Written, written_to
from bridge.hooks.names import act_name, suggestion
from bridge.hooks.parts import KeptHeads, entries_of, picked


def _without_tuple(what: str, index: Index) -> Plain:
    if isinstance(index, tuple):
        raise TypeError(f"{what} is {index}: give {list(index)} for those, or slice{index} for a range")
    return plain(index)


@dataclass(frozen=True)
class _Names:
    """What a pickled cache keeps of its model: its hook points' axes by name, their aliases, the number of layers."""

    axes: dict[str, str]
    aliases: dict[str, str]
    n_layers: int | None


#: The hook points whose activations are taken through weights when terms, heads or neurons are asked for.
_READ_BY_WEIGHTS = (".attn.hook_z", ".attn.hook_result", ".mlp.hook_post", ".hook_scale")
#: Those where the weights stand that begin a stream, or make logits of it, which need not be cached themselves.
_ENDS = ("hook_full_embed", "ln_final.hook_scale", "unembed.hook_in")

#: Axes of heads, of queries and of keys: where scores and patterns wait to be computed, the first two are axes 1 and 2.
_HEADS, _QUERIES, _KEYS = (
    ("n_heads", "n_key_value_heads"), ("pos", "decoder_pos"), ("key_pos", "decoder_key_pos"),
)  # fmt: skip
#: What caches of TransformerLens have besides, and what to use.
_ELSEWHERE = {
    "compute_ssm_effective_attention": "the hook points of the mixer show what it computes (docs/hook_points.md)",
    "compute_ssm_state": "the hook points of the mixer show what it computes (docs/hook_points.md)",
    "logit_lens": "bridge.logit_lens(tokens), or unembed(ln_final(...)) of accumulated_resid",
    "ssm_layers": "bridge.blocks_with('mixer')",
}


def _with_weights(root: nn.Module, name: str, point: Point) -> nn.Module:
    """The module that has the weights: of a scale, its norm."""
    return module_at(root, path_of_norm(point) if name.endswith(".hook_scale") else point.site.path)


@functools.lru_cache(maxsize=10_000)
def _read_by_weights(name: str) -> str | None:
    """The hook point from which an activation is taken through weights; None for others."""
    base = name.rpartition(".")[0]  # of what is seen in a basis of the user's
    return next((found for found in (name, base) if found.endswith((*_READ_BY_WEIGHTS, *_ENDS))), None)


def _weights_behind(values: Mapping[str, Any], model: StudiedBridge | None) -> dict[str, Written]:
    """The state of the weights that activations would be taken through, by hook point."""
    if model is None:
        return {}
    hooks = model.hook_dict
    names = dict.fromkeys([*map(_read_by_weights, values), *_ENDS])
    points = [(name, hooks[name].point) for name in names if name in hooks]
    there = [(name, point) for name, point in points if point.axes != "..."]  # "...": in a module of the user's
    return {name: written_to(_with_weights(model.original_model, name, point)) for name, point in there}


def _alone(value: Tensor) -> Tensor:
    """A tensor without the rest of a larger one that it shows a part of, which would be pickled as well."""
    return value.clone() if value.untyped_storage().nbytes() > value.numel() * value.element_size() else value


class ActivationCache(ResidualMethods):
    """The activations of one run, by any name of their hook points.

    Keys are canonical hook names; aliases and short forms are accepted: ``cache["q", 3]``, ``cache["embed"]``,
    ``cache["resid_post", -1]``, ``cache["scale", 0, "ln1"]`` (see `act_name`).

    Args:
        cache_dict: activations by canonical name, each with a leading batch axis where the run had one.
        model: the bridge that made them, or what forwards to it; its names and facts are used. None: there is none, and
            names are the canonical ones. A pickled cache holds its activations and their names, not the model: for
            analyses, assign `model` after loading.
        has_batch_dim: False where the batch axis was removed.

    Example:
        >>> from bridge import TransformerBridge
        >>> bridge = TransformerBridge.boot_embedded()
        >>> logits, cache = bridge.run_with_cache("Mary and John")
        >>> cache["pattern", 0].shape == cache["blocks.0.attn.hook_pattern"].shape
        True
    """

    #: Each row was run with adapters of its own (PEFT).
    mixes_adapters = False
    #: Of which hook points it holds some heads alone, by canonical name.
    kept_heads: Mapping[str, KeptHeads] = MappingProxyType({})

    @refuse_wrong_types
    def __init__(self, cache_dict: dict[str, Any], model: StudiedBridge | None, has_batch_dim: bool = True) -> None:
        self._fill(cache_dict, model, has_batch_dim)

    def _fill(self, values: dict[str, Any], model: StudiedBridge | None, has_batch_dim: bool) -> None:
        self._values = values  # of tensors, and of what gives one when it is asked for (`Deferred`)
        self._model = model
        self._names: _Names | None = None
        self._weights = _weights_behind(values, model)
        self.has_batch_dim = has_batch_dim

    @property
    def model(self) -> StudiedBridge:
        """The bridge that made the activations; assign one to a cache that was pickled and loaded.

        Raises:
            ValueError: there is none.
        """
        if self._model is None:
            raise ValueError(
                "this cache has no model (it was pickled, or made without one): for analyses, assign the bridge that "
                "made it (cache.model = bridge)"
            )
        return self._model

    @model.setter
    def model(self, model: StudiedBridge) -> None:
        self._model = model
        self._weights = _weights_behind(self._values, model)

    def module_of_the_run(self, name: str) -> nn.Module:
        """The module whose weights a hook point's activation is taken through, if they are the run's.

        Heads are made from ``hook_z``, neurons from ``hook_post``, what a norm leaves of a term with ``hook_scale``,
        logits from what is at the stream's end.

        Args:
            name: of the hook point.

        Raises:
            ValueError: its weights have been changed since, others stand there, or PEFT's adapters there were switched.
                (What is written through ``weight.data`` torch does not count.) Or each row had adapters of its own.
        """
        module = _with_weights(self.model.original_model, name, self.model.hook_dict[name].point)
        then = self._weights.get(name)
        if self.mixes_adapters and hasattr(module, "base_layer"):
            raise ValueError(
                f"each row of this run had adapters of its own (adapter_names=), and the weights at {name} are not "
                "theirs: cache hook_result in the run for what heads write, or run rows of one adapter, which "
                "set_adapter chooses"
            )
        if then is not None and written_to(module) != then:
            raise ValueError(
                f"the weights at {name} were changed since the run (processed, trained, written to, or adapters "
                "switched): what they made then of terms, heads, neurons or logits cannot be computed any more. Take "
                "it before, cache hook_result in the run, or run again"
            )
        return module

    @property
    def cache_dict(self) -> dict[str, Tensor]:
        """All activations by canonical name, those that were put off computed now."""
        for name, value in self._values.items():
            if isinstance(value, Deferred):
                self._values[name] = value.value(name)
        return self._values

    @cache_dict.setter
    def cache_dict(self, activations: dict[str, Tensor]) -> None:
        self._values = activations

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own questions
            raise AttributeError(name)
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # it is there, and says itself what it lacks
        hint = f" Use {_ELSEWHERE[name]}" if name in _ELSEWHERE else suggestion(name, dir(type(self)))
        raise AttributeError(f"an {type(self).__name__} has no {name!r}.{hint}")

    def __getstate__(self) -> dict[str, Any]:
        values = {name: _alone(value) for name, value in self.cache_dict.items()}
        ours = {"_values": values, "_model": None, "_names": self._known(), "_weights": {}}
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
        """The canonical name that an alias stands for; any other name itself."""
        aliases = self._model.names.aliases if self._model is not None else self._known().aliases
        return aliases.get(name, name)

    def _axes(self, name: str) -> str | None:
        """The axes of a hook point, by its canonical name; None where there is no such point."""
        if self._model is None:
            return self._known().axes.get(name)
        hook = self._model.hook_dict.get(name)
        return None if hook is None else hook.point.axes

    def __repr__(self) -> str:
        return f"ActivationCache with {len(self)} activations: {', '.join(list(self._values)[:4])}, ..."

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __contains__(self, key: object) -> bool:
        if type(key) is str and (key in self._values or (self._model is not None and key in self._model.hook_dict)):
            return key in self._values  # most names are canonical
        return isinstance(key, str | tuple) and self._canonical(key) in self._values

    def __getitem__(self, key: str | tuple[Any, ...]) -> Tensor:
        name = key if type(key) is str and key in self._values else self._canonical(key)
        found = self._values.get(name)
        if isinstance(found, Deferred):
            found = self._values[name] = found.value(name)
        if found is None:
            known = self._axes(name.removesuffix("_grad")) is not None
            reason = "it was not asked for, or did not run" if known else "no hook point has this name"
            if (some := self.kept_heads.get(name)) is not None:
                reason = f"it holds the heads {list(some.heads)} alone: cache.part({name!r}, heads={some.heads[0]})"
            raise MissingActivationsError(f"{name!r} is not in the cache: {reason}.{suggestion(name, self._values)}")
        return found

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
        """Some heads, queries or keys of scores or a pattern, of which no others are computed where nobody has yet.

        A cache holds queries and keys until somebody asks for a pattern. One head of a long prompt then takes one
        head's time and memory, ``cache["pattern", layer]`` all of them.

        Args:
            name: of the hook point, such as ``pattern``; any activation with these axes will do.
            layer: its layer, where the name does not say it.
            heads, queries, keys: an index (the axis goes), a slice, or a list; None: all. (A tuple would be a range in
                one place of this library and a choice in another, so there is none here.)

        Raises:
            MissingActivationsError: the cache does not hold it, or holds other heads.
            ValueError: the activation has no such axis.
            IndexError: there are no such heads, queries or keys, or none are chosen.
            TypeError: an index is no whole number, nor several in a row, nor a slice.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> _, cache = bridge.run_with_cache("Mary and John")
            >>> cache.part("pattern", 2, heads=3).shape, cache.part("pattern", 2, heads=[0, 3], queries=-1).shape
            (torch.Size([1, 4, 4]), torch.Size([1, 2, 4]))
        """
        full = self._canonical(name if layer is None else (name, layer))
        axes = (self._axes(full.removesuffix("_grad")) or "").split()
        axes = axes if self.has_batch_dim else axes[1:]
        asked: dict[int, tuple[str, Plain]] = {}
        for what, index, known in (("heads", heads, _HEADS), ("queries", queries, _QUERIES), ("keys", keys, _KEYS)):
            if index is not None:
                found = [axis for axis, said in enumerate(axes) if said in known]
                if what == "heads":  # where a layer has a number of its own
                    found += [axis for axis, said in enumerate(axes[:-1]) if said.isdigit()]
                if not axes:
                    raise ValueError(
                        f"which axes {full} has is not known here: assign the model (cache.model = bridge)"
                    )
                if not found:
                    raise ValueError(f"{full} has the axes [{' '.join(axes)}], and no {what} among them")
                asked[found[0]] = what, _without_tuple(what, index)
        if (some := self.kept_heads.get(full)) is not None and full not in self._values:
            axis = some.axis - (not self.has_batch_dim)
            _, chosen = asked.get(axis, ("heads", None))
            places = some.within(chosen)
            asked[axis], full = ("heads", places[0] if isinstance(chosen, int) else places), some.name
        held = self._values.get(full)
        heads, queries = (asked[axis][1] if axis in asked else None for axis in (1, 2))
        made = held.part(full, heads, queries) if isinstance(held, Deferred) else None
        value = self[full] if made is None else made
        for axis, (what, chosen) in sorted(asked.items(), reverse=True):
            if made is None or axis > 2:
                value = picked(value, {axis: torch.tensor(entries_of(what, chosen, value.shape[axis], full))})
            if isinstance(chosen, int):
                value = value.select(axis, 0)
        return value

    def _canonical(self, key: str | tuple[Any, ...]) -> str:
        if not isinstance(key, str | tuple) or not key:
            raise TypeError(
                f"the key is {shown(key)}; it must be a name, such as 'blocks.0.hook_resid_pre', or a short one and a "
                "layer, such as ('resid_pre', 0)"
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
        """Whether an activation's first axis counts something else than the batch (an expert's rows do)."""
        axes = self._axes(name.removesuffix("_grad"))
        return axes is not None and not axes.startswith("batch")

    def remove_batch_dim(self) -> ActivationCache:
        """Removes the batch axis of a run on one prompt, in place.

        Raises:
            ValueError: the batch holds more than one.

        Example:
            >>> from bridge import TransformerBridge
            >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
            >>> cache.remove_batch_dim()["resid_pre", 0].shape
            torch.Size([3, 128])
        """
        if self.has_batch_dim:
            batched = {name: value for name, value in self.cache_dict.items() if not self._has_rows(name)}
            self.cache_dict |= {name: without_batch_axis(value, name) for name, value in batched.items()}
            self.has_batch_dim = False
        return self

    @refuse_wrong_types
    def apply_slice_to_batch_dim(self, batch_slice: Index) -> ActivationCache:
        """A cache of some rows of the batch.

        Args:
            batch_slice: an index (the batch axis goes), a tuple ``(start, stop)``, or a list of indices.

        Returns:
            A new cache, with views of the activations where that is possible.

        Raises:
            ValueError: there is no batch axis any more; or an activation has none (an expert's rows).

        Example:
            >>> from bridge import TransformerBridge
            >>> _, cache = TransformerBridge.boot_embedded().run_with_cache(["Mary and", "John and", "Anna and"])
            >>> cache.apply_slice_to_batch_dim([0, 2])["resid_pre", 0].shape
            torch.Size([2, 3, 128])
        """
        if not self.has_batch_dim:
            raise ValueError("the batch axis was removed: there is nothing to slice")
        index = plain(batch_slice)
        for name in self._values:
            if self._has_rows(name) and index is not None:
                raise ValueError(f"{name} has rows of the whole batch together: cache without it to slice the batch")
        kept = {name: pick(value, index, 0) for name, value in self.cache_dict.items()}
        new = copy.copy(self)
        new.cache_dict, new.has_batch_dim = kept, not isinstance(index, int)
        return new

    @refuse_wrong_types
    def toggle_autodiff(self, mode: bool = False) -> None:
        """Switches gradients on or off for everything that this thread does with torch (`torch.set_grad_enabled`).

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
        """Moves the activations, in place.

        To an accelerator, and between two of them, copies are queued and the call returns before they are done: what
        reads them there is queued behind them. Copies to the CPU are waited for, since nothing would make a reader on
        the CPU wait; together they are waited for once.

        Args:
            device: where to.
            move_model: move the model too.
        """
        target = torch.device(device)
        sources = {value.device for value in self.cache_dict.values()} - {target}
        self.cache_dict = {name: value.to(target, non_blocking=True) for name, value in self.cache_dict.items()}
        if target.type == "cpu":
            for source in sources:
                if source.type != "cpu":
                    torch.accelerator.synchronize(source)
        if move_model:
            self.model.original_model.to(target)
        return self


def cache_of_run(values: dict[str, Any], model: StudiedBridge) -> ActivationCache:
    """What a run has left: tensors by canonical name, and what gives one when it is asked for."""
    new = ActivationCache.__new__(ActivationCache)
    new._fill(values, model, True)
    return new
