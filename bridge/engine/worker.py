"""In the engine's process: hook points in the tree before it is compiled, and for each pass, whose tokens are whose.

In the forward nothing is done for each request. At a placed site every token has the number of a row (0: nothing is
done), and all tokens are changed at once by what the tables say of their rows; then the tensor is copied into a buffer.
Before a pass the numbers are filled in from the requests that it holds; after it, what was asked for is taken out.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import save as bytes_of
from torch import Tensor, nn

from adapters.views import Args, Kwargs
from bridge.engine import insides
from bridge.engine.tables import SiteRows, unpacked

Captures = dict[tuple[int, int], dict[str, list[tuple[int, Tensor]]]]


class EngineSite:
    """A module's input or output in the engine: tables of edits, each token's row, a buffer of what passed.

    All are buffers of the module, so that they are part of what is compiled.

    Args:
        module: the module.
        kind: ``"input"``, ``"output"``, or ``"attention"``: what its kernel is given.
        key: the name of an input, or the place in a tuple; None: the first. Of a kernel, ``"q"`` or ``"k"``.
        through: an edit is written into the tensor itself, which others hold, too.
        width: how many columns the tensor has.
        room: the numbers of rows, directions, tokens.
        like: a tensor of the model's type and device.
        counts: the tensor holds whole numbers, which are kept, and not changed.
        readings: what probes read of each token, of all sites; None: there are none.
    """

    def __init__(
        self, module: nn.Module, kind: str, key: int | str | None, through: bool, width: int,
        room: tuple[int, int, int], like: Tensor, counts: bool, readings: Tensor | None,
    ) -> None:  # fmt: skip
        rows, rank, tokens = room
        self.probing, self.counts = readings is not None, counts
        self.module, self.tag, self.key, self.through = module, f"_bridge_{kind}_{key}", key, through
        self.editing = self.keeping = True  # while the pass is traced; eager ones are told each time
        tables = {"scale": like.new_ones(rows, width), "add": like.new_zeros(rows, width)}
        tables |= {"norm": like.new_zeros(rows, width), "kept": like.new_zeros(tokens, width)}
        if counts:
            tables["kept"] = tables["kept"].long()
        tables |= {"out": like.new_zeros(rows, rank, width), "read": like.new_zeros(rows, rank, width)}
        tables |= {"bias": like.new_zeros(rows, rank), "threshold": like.new_zeros(rows, rank)}
        tables["row"] = torch.zeros(tokens, dtype=torch.long, device=like.device)
        if readings is not None:
            tables |= {"readings": readings, "probe": like.new_zeros(rows, readings.shape[1], width)}
            tables |= {name: readings.new_zeros(rows, readings.shape[1]) for name in ("probe_bias", "probes", "asks")}
            tables["level"] = readings.new_full((rows,), -torch.inf)
        for name, table in tables.items():
            module.register_buffer(f"{self.tag}_{name}", table, persistent=False)
        if kind == "input":
            module.register_forward_pre_hook(self._before, with_kwargs=True)
        elif kind == "output":
            module.register_forward_hook(self._after)
        else:
            insides.around_attention(module, str(key), self._seen)

    def table(self, name: str) -> Tensor:
        """One of its buffers."""
        found: Tensor = getattr(self.module, f"{self.tag}_{name}")
        return found

    def _before(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        if args:
            return (self._seen(args[0]), *args[1:]), kwargs
        name = self.key if isinstance(self.key, str) else next(iter(kwargs))
        return args, {**kwargs, name: self._seen(kwargs[name])}

    def _after(self, module: nn.Module, args: Args, out: Any) -> Any:
        if isinstance(out, Tensor):
            return self._seen(out)
        place = self.key if isinstance(self.key, int) else 0
        return tuple([self._seen(x) if at == place else x for at, x in enumerate(out)])

    def _seen(self, x: Tensor) -> Tensor:
        """What becomes of the tensor ``[..., token, column]`` of a pass."""
        tokens = x.shape[-2]
        if self.editing and not self.counts:
            row = self.table("row")[:tokens]
            long = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).to(x.dtype)
            new = x * self.table("scale")[row] + self.table("add")[row] + self.table("norm")[row] * long
            along = (x.unsqueeze(-2) * self.table("read")[row]).sum(-1) + self.table("bias")[row]
            along = torch.where(along > self.table("threshold")[row], along, 0.0)
            new = new + (along.unsqueeze(-1) * self.table("out")[row]).sum(-2)
            acts = row > 0
            if self.probing:
                acts = acts & self._holds(x, row)
            new = torch.where(acts.unsqueeze(-1), new, x)  # bit by bit what it was, whatever it was
            x = x.copy_(new) if self.through else new
        if self.keeping:
            self.table("kept")[:tokens].copy_(x.reshape(tokens, x.shape[-1]))
        return x

    def _holds(self, x: Tensor, row: Tensor) -> Tensor:
        """Notes what probes read of tokens, and says for which of them the condition of their row holds."""
        readings = self.table("readings")[: len(row)]
        read = (x.reshape(len(row), 1, -1) * self.table("probe")[row]).sum(-1).float() + self.table("probe_bias")[row]
        readings.copy_(torch.where(self.table("probes")[row] > 0, read, readings))
        asks = self.table("asks")[row]  # what is not asked for may be no number
        return torch.where(asks != 0, readings * asks, 0.0).sum(-1) > self.table("level")[row]


class BridgeWorker(insides.worker_class()):  # type: ignore[misc]
    """vLLM's worker, with hook points in its model: where they are in its tree, and what was asked of each request."""

    def load_model(self, **options: Any) -> None:
        """Loads the model, and places the hook points before anything is compiled."""
        config = self.vllm_config.additional_config["bridge"]
        insides.repair(self.vllm_config.model_config.hf_config, config["routers"])
        super().load_model(**options)
        self.bridge_compiled = insides.is_compiled(self.model_runner)
        self.bridge_sites: list[EngineSite] = []
        self.bridge_found: dict[str, dict[str, object]] = {}
        self.bridge_columns: dict[str, tuple[int, Tensor]] = {}
        self.bridge_edits: dict[str, list[tuple[SiteRows, int]]] = {}
        self.bridge_captures: Captures = {}
        self.bridge_edited_blocks: set[int] = set()
        self._bridge_place(config)

    def _bridge_place(self, config: Mapping[str, Any]) -> None:
        """Puts the hook points into the tree.

        Args:
            config: of the points, by name: path, kind, key, through, width, columns, counts; and ``rows``, ``rank``,
                ``probes``, ``routers``.
        """
        runner = self.model_runner
        room = (config["rows"] + 1, config["rank"], runner.max_num_tokens)
        like = next(runner.model.parameters()).detach().new_zeros(0, dtype=runner.dtype)
        probes, readings = config["probes"], None
        if probes:
            readings = torch.zeros(runner.max_num_tokens, probes, device=like.device)
        known: dict[tuple[nn.Module, str, object], int] = {}
        for name, point in config["points"].items():
            found = insides.found_in(runner.model, point["path"])
            if found is None or (point["kind"] == "input" and found[2] is not None):
                self.bridge_found[name] = {"refused": f"the engine's tree has no module {point['path']}"}
                continue
            module, offset, wide = found
            if insides.is_shared_out(module, point["kind"]):
                self.bridge_found[name] = {"refused": f"several processes share the columns of {point['path']}"}
                continue
            if point["kind"] == "attention":
                kernel = insides.kernel_of(module)
                if isinstance(kernel, str):
                    self.bridge_found[name] = {"refused": kernel}
                    continue
                width = math.prod(kernel[point["key"]])
                point = {
                    **point,
                    "through": False,
                    "columns": range(width),
                    "shape": kernel[point["key"]],
                    "counts": False,
                }
            else:
                kernel, width = None, wide or point["width"]
            at = (module, point["kind"], point["key"])
            if at not in known:
                known[at] = len(self.bridge_sites)
                self.bridge_sites.append(
                    EngineSite(*at, point["through"], width, room, like, point["counts"], readings)
                )
            columns = [column + offset for column in point["columns"]]
            self.bridge_columns[name] = known[at], torch.tensor(columns, device=like.device)
            place = {"site": known[at], "width": width, "columns": columns, "shape": point["shape"]}
            self.bridge_found[name] = {**place, "counts": point["counts"], "kernel": kernel}
        insides.around_passes(runner, self._bridge_begin, self._bridge_end)

    def bridge_places(self) -> dict[str, dict[str, object]]:
        """Where each hook point is, or why it is not."""
        return self.bridge_found

    def bridge_edit(self, said: str, data: bytes) -> None:
        """Fills the tables with the rows of some edits; those before are forgotten.

        Args:
            said, data: see `packed`.
        """
        self.bridge_edits = {}
        free = [1] * len(self.bridge_sites)
        for edit in unpacked(said, data):
            rows = []
            for site in edit.sites:
                begin = free[site.site]
                free[site.site] = end = begin + len(site.codes)
                for name, table in site.tables.items():
                    self.bridge_sites[site.site].table(name)[begin:end].copy_(table)
                rows.append((site, begin))
            self.bridge_edits[edit.key] = rows

    def _bridge_begin(self) -> list[insides.Span]:
        """Says of each token of the pass which rows it has."""
        spans = insides.spans_of(self.model_runner)
        insides.zero_begun_blocks(self.model_runner, spans, self.bridge_edited_blocks)
        total = spans[-1].end if spans else 0
        rows: dict[int, Tensor] = {}
        for span in spans:
            # A server may have put others into the tables since: then this pass of it is nobody's any more.
            for at, begin in self.bridge_edits.get(span.ticket.get("edit", ""), ()):
                row = rows.setdefault(at.site, torch.zeros(total, dtype=torch.long))
                code = torch.zeros(span.end - span.begin, dtype=torch.long)
                for place, choice in enumerate(at.choices):
                    code += choice.mask(span.first, len(code), span.prompt).long() * 2**place
                codes = torch.tensor(at.codes)
                found = torch.searchsorted(codes, code).clamp(max=len(codes) - 1)
                row[span.begin : span.end] = torch.where(codes[found] == code, found + begin, 0)
        asked = {self.bridge_columns[name][0] for span in spans for name in span.ticket.get("capture", ())}
        for number, site in enumerate(self.bridge_sites):
            if self.bridge_compiled or site.editing:
                site.table("row").zero_()
            if number in rows:
                site.table("row")[:total].copy_(rows[number])
            if not self.bridge_compiled:
                site.editing, site.keeping = number in rows, number in asked
        return spans

    def _bridge_end(self, spans: Sequence[insides.Span]) -> None:
        """Takes what was asked for out of the buffers."""
        for span in spans:
            for name in span.ticket.get("capture", ()):
                site, columns = self.bridge_columns[name]
                kept = self.bridge_sites[site].table("kept")[span.begin : span.end].index_select(-1, columns).cpu()
                parts = self.bridge_captures.setdefault((span.ticket["number"], span.sample), {}).setdefault(name, [])
                parts.append((span.first, kept))

    def bridge_weights(self) -> str:
        """A hash of all parameters, by name."""
        total = hashlib.sha256()
        for name, parameter in self.model_runner.model.named_parameters():
            data = parameter.detach().contiguous().reshape(-1).cpu().view(torch.uint8)
            total.update(f"{name} {parameter.dtype} {list(parameter.shape)}".encode())
            total.update(memoryview(data.numpy()))
        return total.hexdigest()

    def bridge_take(self, numbers: Sequence[int]) -> bytes:
        """What was captured of requests, as safetensors: ``number/sample/name -> [pos column]``, from the first on.

        Args:
            numbers: of their tickets.
        """
        found = {}
        for asked, sample in [key for key in self.bridge_captures if key[0] in numbers]:
            for name, parts in self.bridge_captures.pop((asked, sample)).items():
                one = parts[0][1]
                nothing = torch.nan if one.is_floating_point() else -1
                whole = one.new_full((max(first + len(x) for first, x in parts), one.shape[-1]), nothing)
                for first, x in parts:  # what was computed again, after it was preempted, stands last
                    whole[first : first + len(x)] = x
                found[f"{asked}/{sample}/{name}"] = whole
        return bytes_of(found)
