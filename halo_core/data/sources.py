"""Finds what the configuration's data keys name: files, a folder, a saved data set, a hub data set, rows in memory.

Not for reading a file's format (`read.py`) nor for judging rows (`examples.py`).
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halo_core import hub
from halo_core.config import RunConfig
from halo_core.data.read import EXTENSIONS, Record, only, read_file, read_rows, rows_in
from halo_core.errors import Problem, Refused

if TYPE_CHECKING:
    import datasets

PREPARED = "prepared.json"
"""What a folder of `halo data prepare` is known by."""
_ENTRY_KEYS = ("path", "split", "config", "name", "columns", "weight")
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
}
"""Words in a file's name that say which split it holds. Source: the naming rules of hub data sets."""
_METADATA_FILES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "metadata.json")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One place to read rows from: `records()` starts reading it anew each time.

    key: the configuration's key that names it. weight: how often an epoch sees each of its rows. count: the number of
    its rows where that is quickly told, for a bar. digest: 32 hexadecimal digits that are equal exactly when what would
    be read is, or None where nobody can tell without reading the rows; it takes the time of reading the bytes.
    """

    key: str
    name: str
    records: Callable[[], Iterator[Record]]
    weight: float = 1.0
    count: Callable[[], int | None] = lambda: None
    digest: Callable[[], str | None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One data set as the configuration names it."""

    key: str
    path: str
    split: str
    split_key: str
    config: str | None = None
    columns: tuple[str, ...] | None = None
    weight: float = 1.0


def training_sources(config: RunConfig, rows: Iterable[Mapping[str, Any]] | None = None) -> list[Source]:
    """Return where the training rows come from: `rows` in memory, else `datasets`, else `dataset_name`.

    Raises:
        Refused: nothing is named, two things are, or something that is named is not there; all problems at once.
    """
    if rows is not None:
        kept = rows if isinstance(rows, Sized) else list(rows)
        if len(kept) == 0:
            raise Refused(Problem(key="rows", value="[]", why="there is no row", remedy="give at least one row"))
        _refuse_media_features(kept, "rows", "rows")
        return [Source(key="rows", name="rows", records=lambda: read_rows(kept, "rows"), count=lambda: len(kept))]
    if config.datasets and config.dataset_name:
        why = "dataset_name and datasets both name the training rows"
        remedy = "leave dataset_name out, or make it one more entry of datasets"
        raise Refused(Problem(key="dataset_name", value=config.dataset_name, why=why, remedy=remedy))
    if config.datasets:
        return _sources_of(config.datasets, "datasets", config.dataset_train_split, "dataset_train_split", None)
    if config.dataset_name:
        return _sources_of(
            config.dataset_name,
            "dataset_name",
            config.dataset_train_split,
            "dataset_train_split",
            config.dataset_config,
        )
    why = "no rows to train on are named"
    remedy = f"give a file ({', '.join(EXTENSIONS)}), a folder or a hub id"
    raise Refused(Problem(key="dataset_name", value=None, why=why, remedy=remedy))


def evaluation_sources(config: RunConfig, rows_in_memory: bool = False) -> list[Source] | None:
    """Return where the evaluation rows come from, or None when no evaluation is asked for (`eval_strategy: no`).

    `eval_dataset` where given, else the split `dataset_test_split` of `dataset_name`.

    Raises:
        Refused: evaluation is asked for and its rows cannot be found.
    """
    if config.eval_strategy == "no":
        return None
    split = config.dataset_test_split
    if config.eval_dataset:
        sources = _sources_of(config.eval_dataset, "eval_dataset", split, "dataset_test_split", config.dataset_config)
        weighted = [source for source in sources if source.weight != 1.0]
        if weighted:
            why = "evaluation sees every row exactly once"
            raise Refused(Problem(key=f"{weighted[0].key}.weight", value=weighted[0].weight, why=why,
                                  remedy="leave weight out"))  # fmt: skip
        return sources
    if rows_in_memory or not isinstance(config.dataset_name, str):
        why = "evaluation is asked for and no evaluation rows are named"
        remedy = "give eval_dataset, or eval_strategy: no"
        raise Refused(Problem(key="eval_strategy", value=config.eval_strategy, why=why, remedy=remedy))
    return _sources_of(config.dataset_name, "dataset_name", split, "dataset_test_split", config.dataset_config)


def _sources_of(named: Any, key: str, split: str, split_key: str, config_name: str | None) -> list[Source]:
    """Return the sources of a path, a mapping, or a list of such."""
    sources: list[Source] = []
    problems: list[Problem] = []
    for index, item in enumerate(named if isinstance(named, list | tuple) else [named]):
        entry_key = f"{key}[{index}]" if isinstance(named, list | tuple) else key
        try:
            sources.extend(_opened(_entry(item, entry_key, split, split_key, config_name)))
        except Refused as refused:
            problems.extend(refused.problems)
    if problems:
        raise Refused(problems)
    return sources


def _entry(item: Any, key: str, split: str, split_key: str, config_name: str | None) -> _Entry:
    """Return one entry checked: a string, or a mapping with `path`."""
    if isinstance(item, str):
        return _Entry(key=key, path=item, split=split, split_key=split_key, config=config_name)
    expected = f"a path or hub id, or a mapping with the keys {', '.join(_ENTRY_KEYS)}"
    if not isinstance(item, Mapping) or not isinstance(item.get("path"), str):
        raise Refused(Problem(key=key, value=item, why="an entry without a path", remedy=f"give {expected}"))
    unknown = [name for name in item if name not in _ENTRY_KEYS]
    if unknown:
        why = f"unknown in an entry: {', '.join(map(str, unknown))}"
        raise Refused(Problem(key=key, value=item["path"], why=why, remedy=f"give {expected}"))
    columns = item.get("columns")
    if columns is not None and not (isinstance(columns, list | tuple) and all(isinstance(c, str) for c in columns)):
        raise Refused(Problem(key=f"{key}.columns", value=columns, why="not a list of names", remedy="[messages]"))
    weight = item.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0.0 < weight < float("inf"):
        why = "a weight is how often an epoch sees each row"
        raise Refused(Problem(key=f"{key}.weight", value=weight, why=why, remedy="give a number above 0"))
    return _Entry(
        key=key,
        path=item["path"],
        split=str(item.get("split") or split),
        split_key=f"{key}.split" if item.get("split") else split_key,
        config=item.get("config") or item.get("name") or config_name,
        columns=tuple(columns) if columns is not None else None,
        weight=float(weight),
    )


def _opened(entry: _Entry) -> list[Source]:
    """Return the sources of one entry, by what its path is."""
    path = Path(entry.path).expanduser()
    if path.is_file():
        _refuse_other_splits(entry)
        return [_file_source(entry, path, entry.path)]
    if path.is_dir():
        if is_prepared(path):
            why = "it is a folder of `halo data prepare`, which stands for all the rows of a run"
            remedy = "name it by dataset_name alone"
            raise Refused(Problem(key=entry.key, value=entry.path, why=why, remedy=remedy))
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return [_saved_source(entry, path)]
        if entry.config is None:
            return [_file_source(entry, file, _shown(entry, path, file)) for file in _files_of(entry, path)]
        return [_hub_source(entry)]
    if path.exists():
        why = "it is neither a file nor a folder"
        raise Refused(Problem(key=entry.key, value=entry.path, why=why, remedy="write the rows to a file, and name it"))
    if _looks_local(entry.path):
        raise Refused(Problem(key=entry.key, value=entry.path, why="no such file or folder", remedy=_near_files(path)))
    return [_hub_source(entry)]


def _file_source(entry: _Entry, path: Path, shown: str) -> Source:
    if path.suffix.lower() not in EXTENSIONS:
        why = f"files ending in {path.suffix or 'nothing'} are not read"
        raise Refused(Problem(key=entry.key, value=shown, why=why, remedy=f"give one of {', '.join(EXTENSIONS)}"))
    if path.suffix.lower() == ".parquet":
        _refuse_media_in_parquet(entry, path, shown)
    columns = entry.columns

    def records() -> Iterator[Record]:
        found = read_file(path, shown, entry.key)
        return found if columns is None else only(found, columns)

    return Source(
        key=entry.key,
        name=shown,
        records=records,
        weight=entry.weight,
        count=lambda: rows_in(path),
        digest=lambda: _digest([path], path.suffix.lower(), columns),
    )


def is_prepared(path: Path) -> bool:
    """Return whether a folder was written by `halo data prepare`."""
    return (path / PREPARED).is_file()


def _digest(files: Iterable[Path], *also: object) -> str | None:
    """Return one digest of the contents of files and of what else decides what is read; None where one is not there."""
    total = hashlib.blake2b(json.dumps(also, default=str).encode(), digest_size=16)
    try:
        for path in files:
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest())
    except OSError:
        return None  # reading the rows says so, in its own words
    return total.hexdigest()


def _refuse_other_splits(entry: _Entry) -> None:
    """A single file has one split, called train; as evaluation rows it is taken whole."""
    if entry.split == "train" or (entry.key.startswith("eval_dataset") and entry.split_key == "dataset_test_split"):
        return
    if entry.split_key == "dataset_test_split":
        why = f"evaluation is asked for, and the file {entry.path} has no split {entry.split}"
        remedy = "give eval_dataset, or eval_strategy: no"
        raise Refused(Problem(key="eval_dataset", value=None, why=why, remedy=remedy))
    why = f"the file {entry.path} has one split, train"
    raise Refused(Problem(key=entry.split_key, value=entry.split, why=why, remedy="leave the key out"))


def _files_of(entry: _Entry, folder: Path) -> list[Path]:
    """Return the files of a folder that belong to the entry's split, sorted by path.

    A file belongs to the split that a word of its name, or of the folder it lies in, names (`test-0.parquet`,
    `validation/a.jsonl`); a file that names none belongs to train.
    """
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.is_file()
        and file.suffix.lower() in EXTENSIONS
        and file.name not in _METADATA_FILES
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )
    if not files:
        why = f"the folder has no file ending in {', '.join(EXTENSIONS)}"
        raise Refused(Problem(key=entry.key, value=entry.path, why=why, remedy="give the folder that holds the files"))
    by_split: dict[str, list[Path]] = {}
    for file in files:
        words = re.split(r"[^a-z]+", str(file.relative_to(folder)).lower())
        named = [split for word in words for split, names in _SPLIT_WORDS.items() if word in names]
        by_split.setdefault(named[-1] if named else "train", []).append(file)
    wanted = next((split for split, names in _SPLIT_WORDS.items() if entry.split in names), entry.split)
    if wanted in by_split:
        return by_split[wanted]
    if entry.key.startswith("eval_dataset") and len(by_split) == 1 and entry.split_key == "dataset_test_split":
        return files
    raise Refused(_no_split(entry, list(by_split)))


def _no_split(entry: _Entry, splits: list[str]) -> Problem:
    why = f"{entry.path} has no split {entry.split}"
    return Problem(key=entry.split_key, value=entry.split, why=why, remedy=f"one of: {', '.join(splits)}")


def _saved_source(entry: _Entry, folder: Path) -> Source:
    """Return the source of a folder written by `save_to_disk`."""
    import datasets

    loaded = datasets.load_from_disk(str(folder))
    if isinstance(loaded, datasets.DatasetDict):
        if entry.split not in loaded:
            raise Refused(_no_split(entry, list(loaded)))
        loaded = loaded[entry.split]
    else:
        _refuse_other_splits(entry)
    return _dataset_source(entry, loaded)


def _hub_source(entry: _Entry) -> Source:
    """Return the source of a hub data set, fetched now through `datasets`."""
    import datasets
    from datasets.exceptions import DatasetsError

    is_cached = (Path(datasets.config.HF_DATASETS_CACHE) / entry.path.replace("/", "___")).exists()
    obstacle = None if is_cached else hub.obstacle()
    if obstacle is not None:
        why = f"there is no file or folder of this name, nor is it in the cache of data sets, and {obstacle}"
        remedy = "give a local file, or download it first on a machine that reaches the hub"
        raise Refused(Problem(key=entry.key, value=entry.path, why=why, remedy=remedy))
    try:
        loaded = datasets.load_dataset(entry.path, entry.config, split=entry.split)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        told = (str(error).strip().split("\n")[0] or type(error).__name__).rstrip(".")
        why = f"there is no file or folder of this name, and as a hub data set it cannot be read: {told}"
        remedy = "check the name, the split, the config and the connection, or give a local file"
        raise Refused(Problem(key=entry.key, value=entry.path, why=why, remedy=remedy)) from error
    return _dataset_source(entry, loaded)


def _dataset_source(entry: _Entry, loaded: datasets.Dataset) -> Source:
    if entry.columns is not None:
        loaded = loaded.select_columns([column for column in entry.columns if column in loaded.column_names])
    _refuse_media_features(loaded, entry.key, entry.path)
    if len(loaded) == 0:
        why = f"the split {entry.split} is empty"
        raise Refused(Problem(key=entry.key, value=entry.path, why=why, remedy="give a split with at least one row"))
    files = [Path(file["filename"]) for file in loaded.cache_files]
    # Rows in memory have no files; a part of a set has the files of the whole and a fingerprint of its own.
    what = (loaded._fingerprint, len(loaded), loaded.column_names)
    return Source(
        key=entry.key,
        name=entry.path,
        records=lambda: read_rows(loaded, entry.path),
        weight=entry.weight,
        count=lambda: len(loaded),
        digest=lambda: _digest(files, *what) if files else None,
    )


def _refuse_media_features(rows: Any, key: str, shown: str) -> None:
    """Refuse a `datasets.Dataset` with a column of images, video or sound, before any of it is decoded."""
    features = getattr(rows, "features", None)
    names = ("Image", "Audio", "Video")
    columns = [column for column, feature in (features or {}).items() if type(feature).__name__ in names]
    if columns:
        raise Refused(_media(key, shown, columns))


def _refuse_media_in_parquet(entry: _Entry, path: Path, shown: str) -> None:
    """Refuse a parquet file with a column that holds encoded images or sound, before any of it is read."""
    import pyarrow

    try:
        schema = pyarrow.parquet.read_schema(path)
    except (OSError, pyarrow.ArrowException):
        return  # reading the file says so, in its own words
    columns = [
        field.name
        for field in schema
        if pyarrow.types.is_struct(field.type)
        and {child.name for child in field.type} == {"bytes", "path"}
        and (entry.columns is None or field.name in entry.columns)
    ]
    if columns:
        raise Refused(_media(entry.key, shown, columns))


def _media(key: str, shown: str, columns: list[str]) -> Problem:
    why = f"images, video or sound in {', '.join(columns)}: this version trains on text alone"
    remedy = "remove the column, or name the others by an entry of datasets: {path: ..., columns: [messages]}"
    return Problem(key=key, value=shown, why=why, remedy=remedy)


def _looks_local(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).suffix.lower() in EXTENSIONS


def _near_files(path: Path) -> str:
    """Return what to do about a path that is not there: the nearest names beside it."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent} either; check the path"
    near = difflib.get_close_matches(path.name, [file.name for file in path.parent.iterdir()], 3)
    return f"did you mean {', '.join(str(path.parent / name) for name in near)}?" if near else "check the path"


def _shown(entry: _Entry, folder: Path, file: Path) -> str:
    return str(Path(entry.path) / file.relative_to(folder))
