"""`ddp-train prepare`: write token shards of text, in memory that does not grow with the text; or plain files of pickled weights."""

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from ddp_train.cli.saved_run import parse_words
from ddp_train.data.tokens.corpus import Corpus, text_files
from ddp_train.data.tokens.token_shards import INDEX, TokenIndex
from ddp_train.data.tokens.token_writer import TokenWriter, make_tokenizer
from ddp_train.errors import DONE, ConfigError, DataError, plural
from ddp_train.launch.job_runner import JobRunner
from ddp_train.system.folder_lock import lock

_WEIGHTS = """ddp-train prepare weights FOLDER to=FILE.safetensors --unpickle

  FOLDER         a folder of torch.distributed.checkpoint (DCP), as torchtitan and FSDP scripts write it; weights below "model", or all
  to             new file, for init_from= of later runs; only one tensor at a time is in memory
  --unpickle     read the folder's metadata, a pickle: this runs any code that its writer has put there. Use it only if you trust the writer
"""
USAGE = f"""ddp-train prepare tokens FILE... to=FOLDER [key=value ...]

  FILE           text: the whole file is one document; .jsonl: every line is one, {{"text": "..."}}; either with .gz.
                 A folder means all .txt and .jsonl files below it, in the order of their names.
  to             new folder for the tokens; the data.root of later runs
  tokenizer      byte (256 byte values, nothing to install) | tiktoken:NAME, as tiktoken:gpt2      default: byte
  val_fraction   share of the documents, evenly spread, for the split val; of a single text file its end; 0: none      default: 0.01
  shard_tokens   start a new file of tokens after the document that reaches this number      default: 268435456

{_WEIGHTS}"""

_OPTIONS = {"to": "FOLDER", "tokenizer": "NAME", "val_fraction": "SHARE", "shard_tokens": "N"}
_PRINT_EVERY_S = 10.0


def prepare(arguments: list[str], runner: JobRunner) -> int:
    """`ddp-train prepare tokens FILE... to=FOLDER`: make token shards of text; or `prepare weights`."""
    if arguments[:1] == ["weights"]:
        _prepare_weights(arguments[1:])
    elif arguments[:1] == ["tokens"]:
        _prepare_tokens(arguments[1:])
    else:
        happened = f"prepare has no {arguments[0]!r}" if arguments else "no input was given"
        raise ConfigError(happened=happened, expected="tokens or weights", fix="ddp-train prepare tokens FILE... to=FOLDER")
    return DONE


def _prepare_tokens(arguments: Sequence[str]) -> None:
    options, words = parse_words(arguments, USAGE, _OPTIONS, most=None)
    files = _typed_files(words)
    if "to" not in options:
        raise ConfigError(happened="to=FOLDER is missing", expected=USAGE.partition("\n")[0])
    folder, tokenizer = Path(options["to"]).expanduser(), make_tokenizer(options.get("tokenizer", "byte"))
    corpus = Corpus(files, tokenizer, val_fraction=_fraction(options.get("val_fraction", "0.01")))
    folder.mkdir(parents=True, exist_ok=True)
    lock(folder, key="to")
    if (folder / INDEX).exists():
        happened, expected = f"{folder} has an {INDEX} already", "a folder without one; nothing is written over"
        raise ConfigError(key="to", happened=happened, expected=expected, fix="another folder, or delete that one")
    with TokenWriter(folder, tokenizer, shard_tokens=int(options.get("shard_tokens", 1 << 28))) as writer:
        num_bytes = num_tokens = 0
        began = printed = time.monotonic()
        for passage, tokens in corpus.encoded():
            writer.splits[passage.split].append(tokens, num_bytes=len(passage.text), ends_document=passage.ends_document)
            num_bytes, num_tokens = num_bytes + len(passage.text), num_tokens + len(tokens)
            if time.monotonic() > printed + _PRINT_EVERY_S:
                printed = time.monotonic()
                rate = num_bytes / 1e6 / (printed - began)
                print(f"{num_bytes / 1e6:,.0f} MB of text, {num_tokens:,} tokens, {rate:.0f} MB/s", flush=True)
        if not num_tokens:
            raise DataError(happened="there is no text in these files", expected="at least one document that is not empty")
        index = writer.finish()
    _print_summary(folder, index, corpus.empty)


def _typed_files(words: Sequence[str]) -> list[Path]:
    """Return the files that were typed, those of folders too. ConfigError: a word is no file."""
    for word in (word for word in words if not Path(word).exists()):
        expected = f"text or .jsonl files, folders of them, or {', '.join(_OPTIONS)}"
        raise ConfigError(happened=f"there is no file {word}", expected=expected, fix="ddp-train prepare --help")
    return [file for word in words for file in text_files(Path(word))]


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value < 1:
        raise ConfigError(key="val_fraction", happened=f"is {text}", expected="at least 0 and below 1")
    return value


def _print_summary(folder: Path, index: TokenIndex, empty: int) -> None:
    print(f"tokens   {folder}: {index.tokenizer}, {index.vocab_size:,} in the vocabulary, {index.dtype}")
    for name, shards in index.splits.items():
        tokens, documents = sum(shard.tokens for shard in shards), sum(shard.documents for shard in shards)
        print(f"{name:8} {tokens:,} tokens, {plural(documents, 'document')}, {plural(len(shards), 'file')}")
    if empty:
        print(f"         {plural(empty, 'empty document')} left out")
    print(f"bytes    {index.bytes_per_token:.3f} per token")
    without_val = "" if index.splits["val"] else " data.eval=null"
    print(f"train    ddp-train data=token_files data.root={folder}{without_val} model=gpt objective=language_modeling")


def _prepare_weights(arguments: Sequence[str]) -> None:
    options, (word,) = parse_words(arguments, _WEIGHTS, {"to": "FILE", "--unpickle": ""})
    folder, to = Path(word), Path(options.get("to", ""))
    if not (folder / ".metadata").is_file():
        raise ConfigError(happened=f"{folder} is not a folder of torch.distributed.checkpoint", expected="a folder with a file .metadata")
    if to.suffix != ".safetensors":
        raise ConfigError(key="to", happened=f"is {options.get('to')}", expected="a new file.safetensors", fix="to=FILE.safetensors")
    if to.exists():
        raise ConfigError(key="to", happened=f"{to} exists; nothing is written over", expected="a new path")
    if "--unpickle" not in options:
        happened = f"is not given, and {folder / '.metadata'} is a pickle: reading it runs any code that its writer put there"
        fix = f"ddp-train prepare weights {shlex.join(arguments)} --unpickle"
        raise ConfigError(key="--unpickle", happened=happened, expected="--unpickle, if you trust the writer", fix=fix)
    from ddp_train.training.inference.export import from_dcp  # imports torch

    for line in from_dcp(folder, to):
        print(line)
    print(f"written  {to}\nuse      init_from={shlex.quote(str(to))}")
