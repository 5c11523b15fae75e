"""The engine's worker: hook points in the module tree, and the rows of each token before a pass.

The forward contains no code per request. At each placed site every token has a row number (0: no
edit); all tokens are edited at once from the tables of their rows, and the result is copied into a
buffer. Before a pass the row numbers are filled in from its requests; after it, the captured
activations are read from the buffers.
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
from bridge.engine.readings import unpacked_readings
from bridge.engine.tables import SiteRows, unpacked

#: For each request's number and sample: the captured activations by hook point, each with the
#: position of its first token.
Captures = dict[tuple[int, int], dict[str, list[tuple[int, Tensor]]]]


class _EngineSite:
    """A module's input or output in the engine: tables of edits, a row number per token, and a
    capture buffer.

    All of these are buffers of the module, so that they are part of the compiled graph.

    Args:
        module: the module.
        point: the worker's description of the hook point: kind, key, through, counts. Its kind is
            ``"input"``, ``"output"``, or ``"attention"`` (the arguments of its kernel). Its key is
            the name of an input, or the index in a tuple; None: the first. For a kernel, ``"q"`` or
            ``"k"``.
        width: the number of columns of the tensor.
        room: the numbers of rows, directions and tokens.
        like: a tensor with the model's dtype and device.
        readings: the buffer of probe readings per token, shared by all sites; None without probes.

    Attributes:
        through: whether edits are written into the tensor in place, because other modules hold it
            too.
        counts: whether the tensor holds integers, which can be captured but not edited.
        editing, keeping: whether to edit and to capture. They are set while the pass is traced; in
            eager mode the worker sets them before each pass.
    """

    def __init__(
        self,
        module: nn.Module,
        point: Mapping[str, Any],
        width: int,
        room: tuple[int, int, int],
        like: Tensor,
        readings: Tensor | None,
    ) -> None:
        kind = point["kind"]
        self.key = point["key"]
        self.module = module
        self.tag = f"_bridge_{kind}_{self.key}"
        self.through = point.get("through", False)
        self.counts = point.get("counts", False)
        self.probing = readings is not None
        self.editing = self.keeping = True
        tables = _tables(width, room, like)
        if self.counts:
            tables["kept"] = tables["kept"].long()
        if readings is not None:
            tables |= _probe_tables(width, room[0], like, readings)
        for name, table in tables.items():
            module.register_buffer(f"{self.tag}_{name}", table, persistent=False)
        if kind == "input":
            module.register_forward_pre_hook(self._before, with_kwargs=True)
        elif kind == "output":
            module.register_forward_hook(self._after)
        else:
            insides.around_attention(module, self.key, self.see)

    def table(self, name: str) -> Tensor:
        """Return one of its buffers."""
        table: Tensor = getattr(self.module, f"{self.tag}_{name}")
        return table

    def _before(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        if args:
            return (self.see(args[0]), *args[1:]), kwargs
        name = self.key if isinstance(self.key, str) else next(iter(kwargs))
        return args, {**kwargs, name: self.see(kwargs[name])}

    def _after(self, module: nn.Module, args: Args, out: Any) -> Any:
        if isinstance(out, Tensor):
            return self.see(out)
        index = self.key if isinstance(self.key, int) else 0
        return tuple([self.see(x) if place == index else x for place, x in enumerate(out)])

    def see(self, x: Tensor) -> Tensor:
        """Return the tensor ``[..., token, column]`` with which the pass continues: edited, and
        copied into the capture buffer.
        """
        if self.editing and not self.counts:
            new = self._edited(x)
            x = x.copy_(new) if self.through else new
        if self.keeping:
            tokens = x.shape[-2]
            self.table("kept")[:tokens].copy_(x.reshape(tokens, x.shape[-1]))
        return x

    def _edited(self, x: Tensor) -> Tensor:
        """Return a tensor with each token edited by its row."""
        row = self.table("row")[: x.shape[-2]]
        per_token = lambda name: self.table(name)[row]
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        length = length.to(x.dtype)
        new = x * per_token("scale") + per_token("add") + per_token("norm") * length
        readings = (x.unsqueeze(-2) * per_token("read")).sum(-1) + per_token("bias")
        active = torch.where(readings > per_token("threshold"), readings, 0.0)
        new = new + (active.unsqueeze(-1) * per_token("out")).sum(-2)
        is_edited = row > 0
        if self.probing:
            is_edited = is_edited & self._holds(x, row)
        # Tokens without an edit stay bit-identical, NaN included
        return torch.where(is_edited.unsqueeze(-1), new, x)

    def _holds(self, x: Tensor, row: Tensor) -> Tensor:
        """Store the probe readings of tokens, and return the tokens for which their row's condition
        holds.
        """
        per_token = lambda name: self.table(name)[row]
        readings = self.table("readings")[: len(row)]
        products = x.reshape(len(row), 1, -1) * per_token("probe")
        new = products.sum(-1).float() + per_token("probe_bias")
        readings.copy_(torch.where(per_token("probes") > 0, new, readings))
        asks = per_token("asks")  # an unused reading may be NaN
        return torch.where(asks != 0, readings * asks, 0.0).sum(-1) > per_token("level")


def _tables(width: int, room: tuple[int, int, int], like: Tensor) -> dict[str, Tensor]:
    """Return the tables of a site without edits, its row numbers and its capture buffer."""
    rows, rank, tokens = room
    shapes = {
        "add": (rows, width),
        "norm": (rows, width),
        "kept": (tokens, width),
        "out": (rows, rank, width),
        "read": (rows, rank, width),
        "bias": (rows, rank),
        "threshold": (rows, rank),
    }
    tables = {name: like.new_zeros(shape) for name, shape in shapes.items()}
    tables["scale"] = like.new_ones(rows, width)
    tables["row"] = torch.zeros(tokens, dtype=torch.long, device=like.device)
    return tables


def _probe_tables(width: int, rows: int, like: Tensor, readings: Tensor) -> dict[str, Tensor]:
    """Return the tables of a site's probes and conditions."""
    probes = readings.shape[1]
    names = ("probe_bias", "probes", "asks")
    tables = {name: readings.new_zeros(rows, probes) for name in names}
    tables["readings"] = readings
    tables["probe"] = like.new_zeros(rows, probes, width)
    tables["level"] = readings.new_full((rows,), -torch.inf)
    return tables


class BridgeWorker(insides.worker_class()):  # type: ignore[misc]
    """vLLM's worker, with hook points in its module tree and the captures and edits of each
    request.
    """

    def load_model(self, **options: Any) -> None:
        """Load the model, and place the hook points before compilation."""
        config = self.vllm_config.additional_config["bridge"]
        insides.repair(self.vllm_config.model_config.hf_config, config["routers"])
        super().load_model(**options)
        self.bridge_compiled = insides.is_compiled(self.model_runner)
        self.bridge_sites: list[_EngineSite] = []
        self.bridge_found: dict[str, dict[str, Any]] = {}
        self.bridge_columns: dict[str, tuple[int, Tensor]] = {}
        self.bridge_edits: dict[str, list[tuple[SiteRows, int]]] = {}
        self.bridge_readings: dict[str, tuple[str, Any]] = {}
        self.bridge_captures: Captures = {}
        self.bridge_edited_blocks: set[int] = set()
        self._bridge_place(config)

    def _bridge_place(self, config: Mapping[str, Any]) -> None:
        """Place the hook points in the module tree.

        Args:
            config: the hook points, by name: path, kind, key, through, width, columns, counts; and
                ``rows``, ``rank``, ``probes``, ``routers``.
        """
        runner = self.model_runner
        room = (config["rows"] + 1, config["rank"], runner.max_num_tokens)
        like = next(runner.model.parameters()).detach().new_zeros(0, dtype=runner.dtype)
        readings = None
        if config["probes"]:
            readings = torch.zeros(runner.max_num_tokens, config["probes"], device=like.device)
        numbers: dict[tuple[nn.Module, str, int | str | None], int] = {}
        for name, point in config["points"].items():
            placed = self._bridge_placed(point)
            if isinstance(placed, str):
                self.bridge_found[name] = {"refused": placed}
                continue
            module, place = placed
            site = (module, point["kind"], point["key"])
            if site not in numbers:
                numbers[site] = len(self.bridge_sites)
                new = _EngineSite(module, point, place["width"], room, like, readings)
                self.bridge_sites.append(new)
            columns = torch.tensor(place["columns"], device=like.device)
            self.bridge_columns[name] = numbers[site], columns
            self.bridge_found[name] = {"site": numbers[site], **place}
        insides.around_passes(runner, self._bridge_begin, self._bridge_end)

    def _bridge_placed(self, point: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]] | str:
        """Return a hook point's module and the location of its activation there, or the reason why
        it is refused.
        """
        path = point["path"]
        kind = point["kind"]
        location = insides.find_module(self.model_runner.model, path)
        if location is None or (kind == "input" and location[2] is not None):
            return f"the engine's tree has no module {path}"
        module, offset, total = location
        if insides.is_sharded(module, kind):
            return f"several processes share the columns of {path}"
        kernel = None
        width = total or point.get("width", 0)
        if kind == "attention":
            kernel = insides.kernel_of(module)
            if isinstance(kernel, str):
                return kernel
            shape = kernel[point["key"]]
            width = math.prod(shape)
            point = {"columns": range(width), "shape": shape, "counts": False}
        columns = [column + offset for column in point["columns"]]
        place = {"width": width, "columns": columns, "shape": point["shape"]}
        return module, {**place, "counts": point["counts"], "kernel": kernel}

    def bridge_places(self) -> dict[str, dict[str, Any]]:
        """Return where each hook point is placed, or why it is not."""
        return self.bridge_found

    def bridge_edit(self, listing: str, data: bytes) -> None:
        """Fill the tables with the rows of some edits, replacing all earlier ones.

        Args:
            listing, data: see `packed`.
        """
        self.bridge_edits = {}
        free = [1] * len(self.bridge_sites)
        for edit in unpacked(listing, data):
            rows = []
            for site in edit.sites:
                begin = free[site.site]
                free[site.site] = end = begin + len(site.codes)
                for name, table in site.tables.items():
                    self.bridge_sites[site.site].table(name)[begin:end].copy_(table)
                rows.append((site, begin))
            self.bridge_edits[edit.key] = rows

    def bridge_read(self, listing: str, data: bytes) -> None:
        """Add readings that requests may name by their keys.

        Args:
            listing, data: see `unsent`.
        """
        self.bridge_readings |= unpacked_readings(listing, data, self.model_runner.model)

    def _bridge_begin(self) -> list[insides.RequestTokens]:
        """Set the row numbers of each token of the pass."""
        spans = insides.spans_of(self.model_runner)
        insides.zero_begun_blocks(self.model_runner, spans, self.bridge_edited_blocks)
        rows = self._bridge_rows(spans)
        captured = {self.bridge_columns[name][0] for span in spans for name in span.captures}
        for span in spans:
            for key in span.readings:
                captured.add(self.bridge_columns[self.bridge_readings[key][0]][0])
        for number, site in enumerate(self.bridge_sites):
            if self.bridge_compiled or site.editing:
                site.table("row").zero_()
            if number in rows:
                row = rows[number]
                site.table("row")[: len(row)].copy_(row)
            if not self.bridge_compiled:
                site.editing = number in rows
                site.keeping = number in captured
        return spans

    def _bridge_rows(self, spans: Sequence[insides.RequestTokens]) -> dict[int, Tensor]:
        """Return the row number of each token of a pass, by the number of the edited site."""
        total = spans[-1].end if spans else 0
        rows: dict[int, Tensor] = {}
        for span in spans:
            # A server may have filled the tables with other edits since; then nobody waits for the
            # result of this pass.
            for site, begin in self.bridge_edits.get(span.ticket.get("edit", ""), ()):
                row = rows.setdefault(site.site, torch.zeros(total, dtype=torch.long))
                row[span.begin : span.end] = _row_numbers(site, begin, span)
        return rows

    def _bridge_end(self, spans: Sequence[insides.RequestTokens]) -> None:
        """Copy the captured activations out of the buffers, and compute the readings of others."""
        for span in spans:
            values = {name: self._bridge_kept(name, span) for name in span.captures}
            for key in span.readings:
                point, function = self.bridge_readings[key]
                results = function(self._bridge_kept(point, span))
                values |= {f"{key} {name}": result for name, result in results.items()}
            for name, value in values.items():
                request = (span.ticket["number"], span.sample)
                captures = self.bridge_captures.setdefault(request, {})
                captures.setdefault(name, []).append((span.first, value.cpu()))

    def _bridge_kept(self, name: str, span: insides.RequestTokens) -> Tensor:
        """Return a hook point's activation at a request's tokens, ``[token column]``."""
        site, columns = self.bridge_columns[name]
        kept = self.bridge_sites[site].table("kept")[span.begin : span.end]
        return kept.index_select(-1, columns)

    def bridge_weights(self) -> str:
        """Return a hash of all parameters, by name."""
        total = hashlib.sha256()
        for name, parameter in self.model_runner.model.named_parameters():
            data = parameter.detach().contiguous().reshape(-1).cpu().view(torch.uint8)
            total.update(f"{name} {parameter.dtype} {list(parameter.shape)}".encode())
            total.update(memoryview(data.numpy()))
        return total.hexdigest()

    def bridge_take(self, numbers: Sequence[int]) -> bytes:
        """Return the captures of requests as safetensors: ``number/sample/name -> [pos column]``,
        from the first position on.

        Args:
            numbers: the numbers of their tickets.
        """
        captured = {}
        for number, sample in [key for key in self.bridge_captures if key[0] in numbers]:
            for name, parts in self.bridge_captures.pop((number, sample)).items():
                captured[f"{number}/{sample}/{name}"] = _joined(parts)
        return bytes_of(captured)


def _row_numbers(site: SiteRows, begin: int, span: insides.RequestTokens) -> Tensor:
    """Return the row number of each token of a request at a site; 0: no edit.

    Args:
        site: the request's rows.
        begin: the number of the first of them.
        span: the request's tokens.
    """
    length = span.end - span.begin
    code = torch.zeros(length, dtype=torch.long)
    for bit, choice in enumerate(site.choices):
        code += choice.mask(span.first, length, span.prompt).long() * 2**bit
    codes = torch.tensor(site.codes)
    index = torch.searchsorted(codes, code).clamp(max=len(codes) - 1)
    return torch.where(codes[index] == code, index + begin, 0)


def _joined(parts: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Return the captures of several passes as one activation; entries that no pass computed are
    NaN, or -1.

    Args:
        parts: for each pass, the position of its first token, and the activation.
    """
    _, example = parts[0]
    missing = torch.nan if example.is_floating_point() else -1
    length = max(first + len(x) for first, x in parts)
    joined = example.new_full((length, example.shape[-1]), missing)
    for first, x in parts:  # after preemption tokens are computed again; the last value counts
        joined[first : first + len(x)] = x
    return joined
