"""The identity of a run's data: saved in each checkpoint, and compared wherever a run goes on or its weights are used.

    order      what decides which sample comes at which position, by config keys
    data       how many samples there are, and what the data says of itself: sizes, names, first and last bytes; a mixture's weights
    meaning    what its numbers mean: vocabulary, classes, tokenizer, mean and std

What differs is refused with both values, or accepted by `accept_changed_data`, whose code says exactly what is accepted: another change
later is refused again. docs/invariants.md has a table of what could differ, docs/decisions/0069-the-identity-of-the-data.md the reasons.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from ddp_train.checkpoint import catalog
from ddp_train.checkpoint.read import read_shared
from ddp_train.config.auto import yaml_value
from ddp_train.config.run_config import RunConfig
from ddp_train.config.spelling import override
from ddp_train.config.tree import value_at
from ddp_train.distributed.world import World
from ddp_train.errors import UserError, join_few
from ddp_train.loader.dataset_adapter import Source
from ddp_train.loader.loader import TrainLoader
from ddp_train.run_folder.paths import RunFolder

Identity = Mapping[str, Mapping[str, Any]]

PART = "data_identity"  # where a checkpoint's shared state has the identity

_KEY, _BATCH = "accept_changed_data", "trainer.global_batch_size"
_LOADER = ("loader.drop_last", "loader.sampling", "loader.bucket_batches", "loader.sampler")
_ORDER = ("seed", "trainer.batch_size_schedule", "debug.overfit", *_LOADER)
_PROBED = 64  # positions of the order; a function of others' (`loader.sampler`) has no other identity


def identity_of(source: Source, loader: TrainLoader, config: RunConfig) -> Identity:
    """Return the identity of the training data and of the order of its samples. The cost does not grow with the data."""
    order = {_BATCH: config.batch.global_batch_size, **{key: value_at(config.tree, key) for key in _ORDER}}
    if config.loader.sample_weights is not None:  # the file has been read: to hash it costs little beside that
        order["loader.sample_weights"] = xxhash.xxh3_64_hexdigest(Path(config.loader.sample_weights).read_bytes())
    if (first := loader.order.indices(0, 0, min(_PROBED, loader.order.epoch_size or 0))) is not None:
        order["the first samples"] = xxhash.xxh3_64_hexdigest(first.tobytes())
    data = {f"data.{name}": value for name, value in {"samples": loader.num_samples, **source.fingerprint}.items()}
    return {name: yaml_value(part) for name, part in {"order": order, "data": data, "meaning": source.meaning}.items()}


def require_same_meaning(meaning: Mapping[str, Any], known: Mapping[str, Any], *, key: str, accepted: str | None) -> list[str]:
    """Refuse data whose numbers mean something else than a model knows, as far as both say it; return the accepted differences."""
    names = meaning.keys() & known.keys()
    saved, present = ({"meaning": {name: yaml_value(values[name]) for name in names}} for values in (known, meaning))
    happened = "the classes or tokens of the data do not mean what the model was trained with"
    return _require_same(saved, present, accepted=accepted, key=key, happened=happened)


def _require_same(saved: Identity, present: Identity, *, accepted: str | None, key: str, happened: str) -> list[str]:
    """Refuse differences that were not accepted on purpose (UserError); return the accepted ones."""
    old, new = _values(saved), _values(present)
    names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    changes = [_change(name, old.get(name), new.get(name)) for name in names]
    code = "c" + xxhash.xxh3_64_hexdigest(json.dumps(present, sort_keys=True).encode())[:8]
    if not changes or accepted == code:
        return changes
    overrides = " ".join(override(name, old.get(name)) for name in names if name in (_BATCH, *_ORDER))
    fix = f"{overrides or 'the earlier data'}; or, to continue with the present data, {_KEY}={code}"
    raise UserError(key=key, happened="\n    ".join([f"{happened}:", *changes]), expected="the earlier data (on the left)", fix=fix)


def saved_identity(checkpoint: Path) -> Identity:
    """Return the identity of the data that a checkpoint was trained on."""
    identity: Identity = read_shared(checkpoint, only=[PART])[PART]
    return identity


def known_meaning(run: Path) -> Mapping[str, Any]:
    """Return the meaning of the numbers of a run's data from its newest readable checkpoint; {}: none has it.

    The path is a run folder, one of its checkpoints, or a name for one; for any other the result is {}.
    """
    path = run if catalog.is_checkpoint(run) else RunFolder(run).checkpoints / catalog.LAST
    for checkpoint in catalog.candidates(path) if catalog.is_name(path) else [path]:
        with suppress(UserError, OSError):  # whoever reads its weights says so
            return saved_identity(checkpoint).get("meaning", {})
    return {}


def require_same_data(checkpoint: Path, identity: Identity, world: World, config: RunConfig) -> list[str]:
    """Refuse to go on from a checkpoint with other data, or in another order; return the accepted differences. Collective.

    Rank 0 decides: `require_alike` has compared the ranks.
    """

    def compare() -> list[str]:
        happened = f"{checkpoint} was saved with different data: samples would be repeated, skipped, or mean something else"
        changes = _require_same(saved_identity(checkpoint), identity, accepted=config.accept_changed_data, key="resume", happened=happened)
        if changes:
            print(f"{_KEY}: the run continues with these changes:", *changes, sep="\n    ", flush=True)
        return changes

    return world.from_main(compare)


def require_alike(identity: Identity, world: World) -> None:
    """Refuse ranks that have other data than rank 0: copies of it on several machines may differ. Collective."""
    hashes = {name: xxhash.xxh3_64_hexdigest(json.dumps(value).encode()) for name, value in _values(identity).items()}
    differing = [
        f"rank {rank} {name}"
        for rank, hashes_of_rank in enumerate(world.gather_to_main(hashes))
        for name in sorted(hashes.keys() | hashes_of_rank.keys())
        if hashes.get(name) != hashes_of_rank.get(name)
    ]
    if shown := world.from_main(lambda: differing[:8]):
        happened = f"other ranks have other data than rank 0: {', '.join(shown)}"
        raise UserError(key="data", happened=happened, expected="the same data on every machine", fix="copy it again")


def _values(identity: Identity) -> dict[str, Any]:
    return {name: value for part in identity.values() for name, value in part.items()}


def _change(name: str, old: Any, new: Any) -> str:
    """Describe a changed value: a list, such as a vocabulary or classes, by the items that have gone and that have come."""
    if not (isinstance(old, list) and isinstance(new, list)) and name != "vocabulary":
        return f"{name}: {old} -> {new}"
    gone = [repr(item) for item in old or () if item not in (new or ())]
    come = [repr(item) for item in new or () if item not in (old or ())]
    if not gone and not come:
        return f"{name}: in another order"
    return f"{name}: without {join_few(gone) or 'none'}, and with {join_few(come) or 'none'} now"
