"""What a conversion will write: every key and tensor with its source, type and size.

`--dry-run` prints a plan; writing and verifying follow it. All problems with the tensors are
listed at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .checkpoint import FLOATS, Checkpoint, SourceTensor
from .config import DraftConfig
from .draft_vocab import Rows
from .errors import InputError, shorten
from .gguf_file import Field
from .mix import Draft, TypeRule, check_rules, choose, parse_rules
from .pair import DraftFacts, mismatches
from .quantize import is_copy, require_routines
from .rope import llama3_factors
from .schema import (
    KEYS,
    MASK_TOKEN_KEY,
    SKIPPED_NAMES,
    SKIPPED_SUFFIXES,
    TensorRule,
    layer_name,
    rules_for,
)
from .target import Target
from .tensor_types import AUTO, IDS_TYPE, OUT_TYPES, TENSOR_TYPES, FileType, TensorType, out_type

if TYPE_CHECKING:
    import numpy as np

_F32 = TENSOR_TYPES["f32"]
_AUTO_TYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor to write.

    Attributes:
        name: Name in the GGUF.
        shape: Outermost dimension first.
        out: Type it is written as.
        source: Tensor of the checkpoint, None for one that is computed.
        values: The values of a computed tensor.
        head_dim: Set when heads are reordered from interleaved rotary pairs.
        fallback: The wanted type, when another one had to be taken.
    """

    name: str
    shape: tuple[int, ...]
    out: TensorType
    source: SourceTensor | None = None
    values: np.ndarray | None = None
    head_dim: int | None = None
    fallback: TensorType | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes in the GGUF, without padding."""
        return self.out.nbytes(self.elements)


@dataclass(frozen=True)
class PlannedKey:
    """One key to write: a value with its type (`u32`, `f32[]`, ...), or a field copied as it is."""

    name: str
    type: str = ""
    value: Any = None
    field: Field | None = None


@dataclass(frozen=True)
class Plan:
    """A whole conversion."""

    checkpoint: Checkpoint
    config: DraftConfig
    target: Target
    out: FileType
    keys: tuple[PlannedKey, ...]
    tensors: tuple[PlannedTensor, ...]
    skipped: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def types(self) -> dict[str, int]:
        """Number of tensors by type, the most frequent first."""
        return dict(Counter(t.out.name for t in self.tensors).most_common())

    @property
    def source_nbytes(self) -> int:
        """Bytes of all tensors of the checkpoint that are read."""
        return sum(t.source.nbytes for t in self.tensors if t.source is not None)

    @property
    def parameters(self) -> int:
        """Number of weights of the draft."""
        return sum(t.elements for t in self.tensors)


def build_plan(
    checkpoint: Checkpoint,
    config: DraftConfig,
    target: Target,
    outtype: str = AUTO,
    strict: bool = False,
    tensor_types: Sequence[str] = (),
) -> Plan:
    """Plan a conversion.

    Args:
        outtype: Name of a file type, or `auto` for the type of the checkpoint's matrices.
        strict: Turn a type fallback, an ignored config key or a skipped tensor into an error.
        tensor_types: Rules `REGEX=TYPE` for single tensors; of those that match the last decides.

    Raises:
        InputError: The checkpoint and the target do not fit, or tensors are missing, unknown or
            of the wrong shape or type: all of them listed. A type cannot be written.
    """
    require_pair(checkpoint, config, target)
    problems, matched, skipped = _match(checkpoint, config)
    problems += _head_problems(matched, config)
    if problems:
        raise InputError(
            f"the tensors of `{checkpoint.path}` do not match its config", problems=problems
        )
    out = _out_type(outtype, [s for r, _, s in matched if r.kind == "matrix" and not _borrowed(s)])
    tensors = _planned(matched, out, parse_rules(tensor_types), config)
    if config.rope.llama3 is not None:
        dimensions = config.rope.dimensions or config.head_dim
        factors = llama3_factors(config.rope.llama3, config.rope.theta, dimensions)
        tensors.append(PlannedTensor("rope_freqs.weight", factors.shape, _F32, values=factors))
    require_routines({t.out for t in tensors if not _is_copied(t)})
    warnings = list(config.warnings)
    fallbacks = _fallback_sentences(tensors)
    ignored = [f"config keys without effect: {', '.join(config.ignored)}"] if config.ignored else []
    if strict and (fallbacks or ignored or skipped):
        left_out = [f"tensor without effect: `{checkpoint.tensors[n].raw_name}`" for n in skipped]
        raise InputError(
            "`--strict` allows no fallback, no ignored key and no skipped tensor",
            problems=[*fallbacks, *ignored, *left_out],
        )
    warnings += [*fallbacks, *ignored]
    return Plan(
        checkpoint=checkpoint,
        config=config,
        target=target,
        out=out,
        keys=tuple(_keys(config, target, out)),
        tensors=tuple(tensors),
        skipped=tuple(skipped),
        warnings=tuple(warnings),
    )


def require_pair(checkpoint: Checkpoint, config: DraftConfig, target: Target) -> None:
    """Check that a checkpoint fits its target.

    Raises:
        InputError: Listing the reasons why it does not.
    """
    facts = DraftFacts(
        hidden=config.hidden,
        vocab=config.vocab,
        inputs=tuple(i + 1 for i in config.target_layer_ids),
        mask_token_id=config.mask_token_id,
        own_embedding="embed_tokens.weight" in checkpoint.tensors,
        own_head="lm_head.weight" in checkpoint.tensors,
    )
    reasons = mismatches(facts, target)
    if config.num_target_layers not in (None, target.layers):
        reasons.append(
            f"the draft was trained for a target of {config.num_target_layers} layers, this one "
            f"has {target.layers}"
        )
    if reasons:
        raise InputError(
            f"the draft `{checkpoint.path}` does not fit the target `{target.path}`",
            problems=reasons,
            hint="give the GGUF of the model that the draft was trained for",
        )


Matched = tuple[TensorRule, int, SourceTensor]


def _match(
    checkpoint: Checkpoint, config: DraftConfig
) -> tuple[list[str], list[Matched], list[str]]:
    """Pair every tensor with its rule; return problems, pairs and names that are left out."""
    problems: list[str] = []
    matched: list[Matched] = []
    left = dict(checkpoint.tensors)
    for rule, layer in rules_for(config.version, config.layers):
        names = [layer_name(n, layer) for n in (rule.source, *rule.aliases)]
        found = [left.pop(n) for n in names if n in left]
        if not found:
            if not rule.optional:
                shape = _expected(rule, config)
                problems.append(f"missing `{names[0]}` ({_shape(shape)})")
            continue
        if len(found) > 1:
            problems.append(f"both `{found[0].name}` and `{found[1].name}` exist, expected one")
        tensor = found[0]
        problems += _tensor_problems(rule, tensor, config)
        matched.append((rule, layer, tensor))
    skipped = [n for n in left if n in SKIPPED_NAMES or n.endswith(SKIPPED_SUFFIXES)]
    extra = [n for n in left if n not in skipped]
    newer = {
        layer_name(n, i)
        for rule, i in rules_for(2, config.layers)
        if rule.since > config.version
        for n in (rule.source, *rule.aliases)
    }
    for name in extra:
        why = " (DFlash 2, but the config says DFlashDraftModel)" if name in newer else ""
        problems.append(f"unknown `{left[name].raw_name}` ({_shape(left[name].shape)}){why}")
    return problems, matched, skipped


def _tensor_problems(rule: TensorRule, tensor: SourceTensor, config: DraftConfig) -> list[str]:
    problems = []
    expected = _expected(rule, config)
    if tensor.shape != expected:
        names = " x ".join(rule.shape)
        problems.append(
            f"`{tensor.raw_name}` is {_shape(tensor.shape)}, expected {_shape(expected)} ({names})"
        )
    allowed = ("I64", "I32") if rule.kind == "ids" else FLOATS
    if tensor.dtype not in allowed and _kept_type(tensor) is None:
        problems.append(
            f"`{tensor.raw_name}` has type {tensor.dtype}, expected {' or '.join(allowed)}"
        )
    return problems


def _head_problems(matched: list[Matched], config: DraftConfig) -> list[str]:
    """The loader takes a draft's own embedding for its head when there is no other."""
    sources = {rule.source for rule, _, _ in matched}
    embedding, head, ids = (n in sources for n in ("embed_tokens.weight", "lm_head.weight", "d2t"))
    problems = []
    if embedding and not head and not config.tied:
        problems.append(
            "`embed_tokens.weight` without `lm_head.weight`: llama.cpp would use the embedding as "
            "the head, but tie_word_embeddings is false"
        )
    if ids and not head:
        problems.append("`d2t` without `lm_head.weight`: a reduced vocabulary needs its own head")
    if config.draft_vocab < config.vocab and not ids:
        problems.append(
            f"draft_vocab_size is {config.draft_vocab} of {config.vocab}, but there is no `d2t`"
        )
    return problems


def _out_type(outtype: str, matrices: list[SourceTensor]) -> FileType:
    if outtype != AUTO:
        return out_type(outtype)
    sizes = dict.fromkeys(_AUTO_TYPES, 0)
    for tensor in matrices:
        sizes[tensor.dtype] += tensor.elements
    return OUT_TYPES[_AUTO_TYPES[max(sizes, key=lambda d: sizes[d])]]


def _planned(
    matched: list[Matched], out: FileType, rules: tuple[TypeRule, ...], config: DraftConfig
) -> list[PlannedTensor]:
    names = [layer_name(rule.target, layer) for rule, layer, _ in matched]
    matrices = [
        name
        for name, (rule, _, source) in zip(names, matched, strict=True)
        if rule.kind == "matrix" and _kept_type(source) is None
    ]
    check_rules(rules, matrices, [n for n in names if n not in matrices])
    draft = Draft(config.layers, config.heads // config.kv_heads, "output.weight" in names)
    tensors = []
    for name, (rule, _, source) in zip(names, matched, strict=True):
        if rule.kind == "ids":
            ids = _absolute_ids(source, config.vocab)
            tensors.append(PlannedTensor(name, source.shape, IDS_TYPE, source, ids))
            continue
        wanted = written = _kept_type(source) or _F32
        if name in matrices:
            wanted, written = choose(name, source.row, out, draft, rules)
        head_dim = config.head_dim if rule.per_head and config.interleaved else None
        fallback = wanted if wanted is not written else None
        tensors.append(PlannedTensor(name, source.shape, written, source, None, head_dim, fallback))
    return tensors


def _borrowed(source: SourceTensor) -> bool:
    return isinstance(source, Rows) and source.borrowed


def _kept_type(source: SourceTensor) -> TensorType | None:
    """The type of rows that are copied from a GGUF as they are."""
    return source.kept if isinstance(source, Rows) else None


def _is_copied(tensor: PlannedTensor) -> bool:
    return tensor.source is not None and is_copy(tensor.source.dtype, tensor.out)


def _fallback_sentences(tensors: list[PlannedTensor]) -> list[str]:
    """A sentence for each size of rows and type that had to give way."""
    groups: dict[tuple[int, TensorType, TensorType], list[str]] = {}
    for t in tensors:
        if t.fallback is not None:
            groups.setdefault((t.shape[-1], t.fallback, t.out), []).append(t.name)
    return [
        f"{out.name} instead of {wanted.name}, whose blocks of {wanted.block} do not divide rows "
        f"of {row}: {', '.join(shorten((f'`{n}`' for n in names), 3))}"
        for (row, wanted, out), names in groups.items()
    ]


def _absolute_ids(source: SourceTensor, vocab: int) -> np.ndarray:
    """A checkpoint stores target id minus draft id; the loader wants the target ids."""
    import numpy as np

    ids = source.read(0, source.elements).astype(np.int64) + np.arange(source.elements)
    outside = int(np.count_nonzero((ids < 0) | (ids >= vocab)))
    doubled = ids.size - np.unique(ids).size
    if outside or doubled:
        raise InputError(
            f"`{source.raw_name}` maps {outside} tokens outside the vocabulary of {vocab} and "
            f"{doubled} twice, expected neither"
        )
    return ids


def _keys(config: DraftConfig, target: Target, out: FileType) -> list[PlannedKey]:
    keys = [PlannedKey("general.file_type", "u32", out.number)]
    for rule in KEYS:
        value = rule.value(config)
        if value is not None:
            keys.append(PlannedKey(rule.key, rule.type, value))
    keys += [PlannedKey(name, field=field) for name, field in target.tokenizer.items()]
    keys.append(PlannedKey(MASK_TOKEN_KEY, "u32", config.mask_token_id))
    return keys


def _expected(rule: TensorRule, config: DraftConfig) -> tuple[int, ...]:
    return tuple(getattr(config, name) for name in rule.shape)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
