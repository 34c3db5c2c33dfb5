"""Data sets, samplers and loaders of a run, made from the sections `data` and `loader`, and what does not fit together among them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ddp_train.config.batch_sizes import accumulation_of
from ddp_train.config.run_config import RunConfig, data_config, evaluation_sets
from ddp_train.config.schema import LoaderConfig, TrainerConfig
from ddp_train.config.targets.locate import locate
from ddp_train.config.targets.target import AUTO, declares, run_arguments
from ddp_train.data.mixture import Mixture
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, UserError, conflict
from ddp_train.interfaces import DataSource
from ddp_train.loader.dataset_adapter import Collate, Source, Stream, as_source, dataset_of, is_stream
from ddp_train.loader.loader import EvaluationLoader, PositionedEvaluationLoader, PositionedTrainLoader, TrainLoader, require_samples
from ddp_train.loader.mixture import MixtureSource
from ddp_train.loader.order import BatchOrder, SampleOrder
from ddp_train.loader.reader import BlendFunction, LengthPlan
from ddp_train.loader.sampler import labels_of, sampler_from
from ddp_train.training.instantiate import instantiate


def make_data(config: RunConfig, *, key: str) -> Any:
    """Return the data set of the section `data`, or of an evaluation set with the key `data.eval` or `evaluation.sets.<name>`."""
    try:
        return instantiate(data_config(config.tree, key), key=key)
    except UserError as error:
        name = error.key.removeprefix("data.")
        if name in evaluation_sets(config.tree).get(key, ()):  # a data set knows its arguments as `data.split` alone
            error.key = f"{key}.{name}"
            error.fix = error.fix.replace(f"data.{name}=", f"{key}.{name}=")
        raise


def make_source(config: RunConfig, *, key: str) -> Source:
    """Return the data source or stream of a key (`make_data`)."""
    data = make_data(config, key=key)
    collate = instantiate(config.loader.collate, key="loader.collate") if config.loader.collate is not None else None
    if collate is not None and not callable(collate):
        expected = "a function that takes a list of samples, or a class whose objects do"
        raise ConfigError(key="loader.collate._target_", happened=f"gave a {type(collate).__name__}", expected=expected)
    return adapt(data, config.loader.fields, collate)


def adapt(data: Any, fields: Sequence[str] | None = None, collate: Collate | None = None) -> Source:
    """Return the data source or stream around the object that a `_target_` made."""
    if not isinstance(data, Mixture):
        return Stream(data, fields, collate) if is_stream(data) else as_source(data, fields, collate)
    for name, part in data.sources.items():
        if is_stream(part):
            happened = f"is a stream ({type(part).__name__}): its samples have no positions to draw from and to resume at"
            expected = "data with positions (`ddp-train help docs/data.md`)"
            raise ConfigError(key=f"data.sources.{name}.data", happened=happened, expected=expected)
    return MixtureSource({name: as_source(part, fields, collate) for name, part in data.sources.items()}, data.weights)


def _blend(facts: Mapping[str, Any], loader: LoaderConfig) -> BlendFunction | None:
    wanted = {"mixup_alpha": loader.mixup_alpha, "cutmix_alpha": loader.cutmix_alpha}
    if not any(wanted.values()):
        return None
    if "num_classes" not in facts:
        key = next(name for name, alpha in wanted.items() if alpha)
        happened, expected = "is given, and the data does not say how many classes it has", "a data set with `num_classes` in its facts"
        raise conflict(f"loader.{key}", happened, "null", expected=expected)
    from ddp_train.loader import blend

    return blend.Blend(num_classes=int(facts["num_classes"]), **wanted)


def _user_sampler(source: DataSource, config: RunConfig) -> Any:
    """Return the sampler of `loader.sampler`, with the arguments that it asks for by name; None: the key is null."""
    sampler_config, key = config.loader.sampler, "loader.sampler"
    if sampler_config is None:
        return None
    dataset = dataset_of(source)
    offers: dict[str, Callable[[], Any]] = {
        "data_source": lambda: dataset,
        "dataset": lambda: dataset,
        "labels": lambda: labels_of(source),
        "seed": lambda: config.seed,
        "global_batch_size": lambda: config.batch.global_batch_size,
    }
    target = locate(sampler_config["_target_"])
    answers = {f"{key}.{name}": offers[name]() for name in run_arguments(key) if name not in sampler_config and declares(target, name)}
    return instantiate({**sampler_config, **dict.fromkeys((name.rpartition(".")[2] for name in answers), AUTO)}, key=key, answers=answers)


def make_train_loader(source: Source, config: RunConfig, world: World) -> TrainLoader:
    loader, batch = config.loader, config.batch
    drop_last = loader.drop_last or config.debug.overfit
    if isinstance(source, Stream):
        from ddp_train.loader.stream import StreamTrainLoader

        _refuse_positions(loader)
        _require_one_pass(config, source)
        return StreamTrainLoader(
            source,
            BatchOrder(source.length, global_batch_size=batch.global_batch_size, drop_last=drop_last),
            rank=world.rank,
            world_size=world.size,
            grad_accum_steps=batch.grad_accum_steps,
            num_workers=loader.num_workers,
            pin_memory=_pins_memory(loader, world),
        )
    multiple_of = batch.global_batch_size if loader.drop_last else 1
    require_samples(source, key="data", at_least=multiple_of)
    given_sampler, mixture = _user_sampler(source, config), None
    if isinstance(source, MixtureSource):
        if given_sampler is not None:
            raise conflict("loader.sampler", "is given, and the weights of data.sources say which sample comes when", "null")
        given_sampler = mixture = source.sampler(
            seed=config.seed, sampling=loader.sampling, sample_weights=loader.sample_weights, multiple_of=multiple_of
        )
    sampler = sampler_from(
        source,
        given_sampler,
        seed=config.seed,
        sampling=loader.sampling,
        sample_weights=loader.sample_weights,
        multiple_of=multiple_of,
        global_batch_size=batch.global_batch_size,
        bucket_batches=loader.bucket_batches,
    )
    changes = [(step, min(size, sampler.length)) for step, size in config.trainer.batch_size_schedule or ()]
    order = SampleOrder(sampler, global_batch_size=min(batch.global_batch_size, sampler.length), drop_last=drop_last, changes=changes)
    grad_accum_steps, num_micro_batches_of = batch.grad_accum_steps, None
    if changes:  # the last batch of an epoch has as few micro-batches as its size asks for
        num_micro_batches_of = partial(accumulation_of, loader=loader, world_size=world.size)
        grad_accum_steps = max(num_micro_batches_of(size) for size in (order.global_batch_size, *(size for _, size in changes)))
    return PositionedTrainLoader(
        source,
        order,
        rank=world.rank,
        world_size=world.size,
        grad_accum_steps=grad_accum_steps,
        num_workers=loader.num_workers,
        pin_memory=_pins_memory(loader, world),
        skips_bad_samples=loader.on_bad_sample == "skip",
        num_micro_batches_of=num_micro_batches_of,
        # Within a window of batches the samples of each source are not counted.
        samples_by_source=mixture.samples_by_source if mixture is not None and loader.bucket_batches is None else None,
        blend=_blend(source.facts, loader),
    )


def make_length_plan(source: Source, trainer: TrainerConfig) -> LengthPlan | None:
    """Return the length of windows of tokens at each step, of which the data has to be made; None: it never changes."""
    if not trainer.length_schedule:
        return None
    whole = source.facts.get("context_length")
    if not isinstance(whole, int) or source.lengths is not None:  # they differ, as those of documents do
        expected = "data=char_text, token_files, packed_tokens, or a source of windows with the fact `context_length`; or null"
        raise conflict("trainer.length_schedule", "is given, and the data is not made of windows of one length", "null", expected=expected)
    if uneven := [change.value for change in trainer.length_schedule if whole % change.value]:
        near = max(each for each in range(1, min(uneven[0], whole) + 1) if whole % each == 0)
        happened = f"has a length of {uneven[0]}, and windows have {whole} tokens (data.context_length)"
        raise ConfigError(key="trainer.length_schedule", happened=happened, expected=f"lengths that divide it, as {near}")
    return LengthPlan(whole, trainer.length_schedule)


def make_eval_loader(source: Source, config: RunConfig, world: World, *, key: str) -> EvaluationLoader:
    loader, batch_size = config.loader, config.evaluation.batch_size
    limits = [limit * batch_size for limit in (config.evaluation.max_batches, config.debug.max_batches) if limit is not None]
    max_samples = min(limits, default=None)
    if isinstance(source, Stream):
        from ddp_train.loader.stream import StreamEvaluationLoader

        _refuse_positions(loader)
        return StreamEvaluationLoader(source, rank=world.rank, world_size=world.size, batch_size=batch_size, max_samples=max_samples)
    require_samples(source, key=key)
    return PositionedEvaluationLoader(
        source,
        rank=world.rank,
        world_size=world.size,
        batch_size=batch_size,
        num_workers=loader.num_workers,
        pin_memory=_pins_memory(loader, world),
        skips_bad_samples=loader.on_bad_sample == "skip",
        max_samples=max_samples,
    )


def _pins_memory(loader: LoaderConfig, world: World) -> bool:
    return world.device.type == "cuda" and not loader.on_device


def _refuse_positions(loader: LoaderConfig) -> None:
    """Refuse for a stream what needs positions: samples to choose from, and one to name when it cannot be read."""
    unset = dict.fromkeys(("bucket_batches", "sampler", "mixup_alpha", "cutmix_alpha"))
    for key, allowed in {"on_bad_sample": "raise", "sampling": "shuffled", **unset, "on_device": False}.items():
        if getattr(loader, key) != allowed:
            expected = f"{'null' if allowed is None else str(allowed).lower()}: samples of a stream have no positions"
            if key == "on_bad_sample":
                expected += "; it has to skip by itself (WebDataset: handler=warn_and_continue)"
            raise ConfigError(key=f"loader.{key}", happened=f"is {getattr(loader, key)}, and the data is a stream", expected=expected)


def _require_one_pass(config: RunConfig, stream: Stream) -> None:
    """Refuse for a stream to count in epochs where it has none, and batch sizes that change: what it has read ahead was cut for one."""
    name = type(stream.dataset).__name__
    if stream.length is None:
        from ddp_train.config.rules.training import without_epochs  # with all rules, which the launcher has checked

        for problem in without_epochs(name, config.trainer, config.evaluation, bool(evaluation_sets(config.tree))):
            raise problem
    if config.trainer.batch_size_schedule:
        happened = f"is given, and the data is a stream ({name})"
        raise conflict("trainer.batch_size_schedule", happened, "null", expected="data with positions, or null")


def place_data(sources: Iterable[Source], loader: LoaderConfig, world: World) -> None:
    """Move data sets to the rank's device, if that is wanted; let images travel to a GPU as bytes, where they can."""
    for source in sources:
        if isinstance(source, Stream) or world.device.type == "meta":
            continue
        if loader.on_device:
            source.to(world.device)
        elif world.device.type == "cuda":
            source.give_pixels()


def require_same_facts(train: Mapping[str, Any], evaluation: Mapping[str, Any], *, key: str) -> None:
    """Refuse splits of two kinds: a class folder that one of them lacks would shift the labels without a word."""
    for name in train.keys() & evaluation.keys():
        if train[name] != evaluation[name]:
            happened = f"the evaluation split has {name} {evaluation[name]}, the training split {train[name]}"
            raise ConfigError(key=key, happened=happened, expected="the same in both")
