"""The run's folder: where a run keeps its files, how the folder is made, and how it is opened again.

It knows paths, the secret and the resolved run file, and nothing about the contents of other files. Its functions that
write a file or a folder whole or not at all serve every room.
"""

import contextlib
import fcntl
import logging
import operator
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from shoal.config import PRESET_LR, EnvConfig, RunConfig, keys_that_keep_less, unsafe_changes
from shoal.config.load import with_absolute_paths, with_digests
from shoal.errors import StateError, cause_of
from shoal.protocol.encoding import WireError, domain_hash, to_json
from shoal.protocol.messages import Sampling
from shoal.protocol.task_draws import TaskList, read_task_list
from shoal.typed_toml import from_tree, to_tree

log = logging.getLogger(__name__)

FOUND = (("train", "microbatch_tokens", 0), ("train", "lr", PRESET_LR), ("eval", "rows", 0))
"""Keys of a run file with the value that leaves them to the launcher; see `launch/sizing`."""

COLD_START_RECIPE = "recipe.json"
"""The resolved recipe of a cold start, in the folder beside its result."""


def cold_start_folder(out: Path) -> Path:
    """What `shoal sft` saves beside its result `out`."""
    return out.absolute().parent / f"{out.absolute().name}-checkpoints"


class ColdStart(msgspec.Struct, frozen=True):
    """What a cold start's evaluations play."""

    env: EnvConfig
    sampling: Sampling


def cold_start_of(policy: Path) -> ColdStart | None:
    """The cold start that made a policy, or that kept it for an evaluation; None if no recipe beside it says so."""
    for folder in (cold_start_folder(policy), policy.absolute().parent):
        if folder.name.endswith("-checkpoints"):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                return msgspec.json.decode((folder / COLD_START_RECIPE).read_bytes(), type=ColdStart)
    return None


class RunFolder:
    """Paths of a run. The attributes say what is where."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.run_file = root / "run.json"
        self.start_file = root / "run.start.json"
        """The run file of a resume until the coordinator takes it: a resume that is refused changes no run."""
        self.secret_file = root / "secret.seed"
        self.log = root / "log.sqlite"
        self.blobs = root / "blobs"
        self.chunks = root / "chunks"
        """Links to the blobs that anyone may read; the origin serves them."""
        self.keys = root / "keys"
        self.root_key_file = self.keys / "root.pub"
        """The public part of the key that names publishers, if that is not the run key."""
        self.trainer = root / "trainer"
        self.outgoing = root / "trainer" / "outgoing"
        """Chunks of the version that the trainer publishes, for the coordinator to take over."""
        self.policy = root / "policy"
        """Version 0, made or copied at the first start."""
        self.checkpoints = root / "checkpoints"
        self.metrics = root / "metrics.jsonl"
        self.alarms = root / "alarms.jsonl"
        """A line when an alarm is raised, and one when it is cleared; see `shoal/alarms`."""
        self.scores = root / "scores"
        """What rollouts scored, part by part, for the trainer's next line of metrics."""
        self.hub = root / "hub"
        """A registry of packages that the coordinator serves, if the host has pushed any there."""
        self.logs = root / "logs"
        self.first_prompts = self.logs / "first-prompts.txt"
        self.loggers = root / "loggers"
        """Files of W&B, trackio and TensorBoard, and how far each has come."""
        self.nodes = root / "nodes"
        self.evaluations = root / "eval"
        self.shifts = root / "shifts"
        """Where processes queue for the devices that they share."""
        self.task_lists = root / "tasks"
        """Lists of tasks that the run draws from, by their digests."""
        self.summary = root / "summary.json"
        self.address = root / "coordinator.json"
        self.origin_address = root / "origin.json"
        self.dashboard_address = root / "dashboard.json"
        self.dashboard_index = root / "dashboard.sqlite"
        """What the page has read of the run, texts that are still private included."""
        self.dashboard_token = self.keys / "dashboard.token"
        """Who shows it to the page is the host."""
        self.dashboard_link = self.keys / "dashboard.url"
        """The page's address with the token."""
        self.stage_address = root / "stage.json"
        self.reply_store = root / "stage.sqlite"

    def demand_own(self) -> None:
        """Raise `StateError` if the folder has no run, and files of something else: `--out` names it by mistake."""
        if self.run_file.exists() or not self.root.is_dir():
            return
        known = {path.name for path in vars(self).values() if path.parent == self.root} | {"lost+found"}
        others = sorted(path.name for path in self.root.iterdir() if path.name not in known and path.name[0] != ".")
        if others:
            named = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
            raise StateError(
                f"{self.root} is no run's folder (it has no {self.run_file.name}) and holds {named}: give a "
                "new or empty folder with --out"
            )

    def config(self) -> RunConfig:
        """The resolved run file. Raises `StateError` if the folder has no run."""
        return from_tree(self._tree(), RunConfig, str(self.run_file))

    def start_config(self) -> RunConfig:
        """The run file of the start under way, which nothing has refused yet. Raises as `config`."""
        if not self.start_file.exists():
            return self.config()
        return from_tree(self._tree(self.start_file), RunConfig, str(self.start_file))

    def take_start(self) -> None:
        """From now on the run has the run file of the start under way. Raises OSError."""
        if self.start_file.exists():
            os.replace(self.start_file, self.run_file)
            sync_folder(self.root)

    def drop_start_config(self) -> None:
        """Forget the run file of a start that was refused, if it was not taken."""
        self.start_file.unlink(missing_ok=True)

    def _tree(self, file: Path | None = None) -> dict[str, Any]:
        try:
            return msgspec.json.decode((file or self.run_file).read_bytes(), type=dict[str, Any])
        except FileNotFoundError:
            raise StateError(f"{self.root} holds no run: start one with `shoal run RECIPE --out {self.root}`") from None
        except NotADirectoryError:
            raise StateError(f"{self.root} is a file, or below one: give a run's folder, or its URL") from None
        except (OSError, msgspec.DecodeError) as error:
            raise StateError(f"{self.run_file} cannot be read: {error}. Restore it, or start a new folder") from None

    def task_list(self, env: EnvConfig) -> TaskList | None:
        """What a resolved run file lets an environment's tasks be drawn from; None for all. Raises `StateError`."""
        if not env.tasks:
            return None
        path = self.task_lists / f"{env.tasks}.json"
        try:
            found = read_task_list(path.read_bytes())
        except (OSError, WireError) as error:
            raise StateError(f"the task list {path} cannot be read: {error}. Restore it from a copy") from None
        if found.digest != env.tasks:  # guard: task-list-of-its-digest
            raise StateError(f"the task list {path} has the digest {found.digest}: restore it from a copy")
        return found

    def secret(self) -> bytes:
        """The secret of the run, 32 bytes: its tasks, seeds and audits follow from it."""
        try:
            return bytes.fromhex(self.secret_file.read_text().strip())
        except (OSError, ValueError) as error:
            raise StateError(
                f"the run's secret {self.secret_file} cannot be read: {error}. Restore it from a copy"
            ) from None

    def root_key(self) -> str:
        """The key that names publishers; empty if it is the run key. Raises `StateError`."""
        try:
            return self.root_key_file.read_text().strip() if self.root_key_file.exists() else ""
        except (OSError, ValueError) as error:
            raise StateError(f"{self.root_key_file} cannot be read: {error}. Restore it from a copy") from None

    def run_id(self) -> str:
        """The run's name on the wire: 32 hex digits, made from the secret."""
        return domain_hash("run", self.secret())[:16].hex()

    def weights_seed(self, config: RunConfig) -> int:
        """Seed of the first weights, if the run file names no policy: from its `seed`, or from the secret without one."""
        source = _secret_of(config.seed) if config.seed >= 0 else domain_hash("first weights", self.secret())
        return int.from_bytes(source[:4], "big")

    def has_public_secret(self, config: RunConfig) -> bool:
        """Whether anyone who knows the run file can compute the secret."""
        return config.seed >= 0 and self.secret() == _secret_of(config.seed)

    def prepare(
        self, config: RunConfig, recipe_dir: Path, *, for_others: bool = False,
        repeatable: Callable[[EnvConfig], bool] = lambda env: True, overrides: Iterable[str] = (),
    ) -> bool:  # fmt: skip
        """Make the folder, or open it again. Returns whether the run is resumed. `for_others`: strangers will join.
        `repeatable`: whether an environment says that others can repeat its answers. It is asked where that decides who
        plays. `overrides`: what --set said of the run file; a resumed run keeps less only by such words.

        A run of this machine alone derives its secret from the run file's `seed`, so that it can be repeated; any other
        gets 32 random bytes. Raises `StateError` if a run that began the first way is to be opened to others, or, naming
        the keys, if the run file changed in a way that is not allowed during a run, or would delete what is kept.
        """
        for_others = for_others or config.host.is_reached_by_others  # guard: reachable-is-for-others
        resumed = self.run_file.exists()
        whole, lists = with_digests(with_absolute_paths(config, recipe_dir))
        old = {env.label: env.kind for env in self.config().envs} if resumed else {}
        found = _as_found(whole, self.config()) if resumed else whole
        if resumed and self.summary.exists():  # it has ended, and deletes nothing more
            if asked := [word for word in overrides if word.strip().startswith("storage")]:
                log.warning("the run in %s has ended, so --set %s changes nothing", self.root, " ".join(asked))
            found = msgspec.structs.replace(found, storage=self.config().storage)
        tree = to_tree(_with_kinds(found, for_others, old, repeatable))
        if resumed:
            changed = unsafe_changes(to_tree(self.config()), tree)  # keys added since then get their defaults
            if changed and not any(path.exists() for path in (self.log, self.policy, self.trainer)):  # it never began
                resumed, tree = False, to_tree(_with_kinds(whole, for_others, {}, repeatable))
            elif changed:
                raise StateError(
                    f"the run file differs from the one that {self.root} was started with, in {', '.join(changed)}: "
                    "undo that to resume, or give --out for a new run"
                )
            self._demand_kept(found, overrides)
        try:
            for folder in (self.root, self.keys, self.logs, self.nodes, self.evaluations, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            for one in lists:
                write_atomically(self.task_lists / f"{one.digest}.json", to_json(one))
            began = resumed or self.log.exists()
            if not (began and self.secret_file.exists()):  # guard: secret-of-this-start
                # guard: random-secret
                secret = _secret_of(config.seed) if config.seed >= 0 and not for_others else secrets.token_bytes(32)
                write_atomically(self.secret_file, secret.hex().encode(), mode=0o600)
            if for_others and self.has_public_secret(config):  # guard: public-secret-stays-here
                raise StateError(
                    f"the run in {self.root} began on this machine alone, with secrets that follow from seed = "
                    f"{config.seed}: anyone who joins could compute every task and audit. Give --out for a new run"
                )
            self.drop_start_config()
            if not (resumed and self.log.exists()):
                write_atomically(self.run_file, msgspec.json.format(msgspec.json.encode(tree)))
            elif tree != to_tree(self.config()):
                write_atomically(self.start_file, msgspec.json.format(msgspec.json.encode(tree)))
        except OSError as error:
            raise StateError(
                f"cannot write to {self.root}: {cause_of(error)}. Free some space, or give another --out"
            ) from None
        return resumed

    def _demand_kept(self, config: RunConfig, overrides: Iterable[str]) -> None:
        """Raise `StateError` if a resume would delete what the run kept, and no override asks for that."""
        if not self.log.exists():
            return
        before, asked = self.config(), {override.partition("=")[0].strip() for override in overrides}
        for key in keys_that_keep_less(before.storage, config.storage):
            old, new = map(operator.attrgetter(key), (before, config))
            if asked.isdisjoint((key, key.partition(".")[0])):  # guard: kept-until-told
                raise StateError(
                    f"{key} = {new}, and the run in {self.root} keeps by {key} = {old}: what only that keeps would be "
                    f"deleted. Start with --set {key}={old}, as before, or let it be deleted by --set {key}={new}"
                )

    def keep_found(self, config: RunConfig) -> None:
        """Keep what the launcher found where the run file leaves it open. Raises `StateError`."""
        if config == self.start_config():
            return
        try:
            file = self.start_file if self.log.exists() else self.run_file
            write_atomically(file, msgspec.json.format(msgspec.json.encode(config)))
        except OSError as error:
            raise StateError(f"cannot write to {self.root}: {cause_of(error)}. Free some space") from None


def is_url(run: str | Path) -> bool:
    """Whether what names a run is the URL of a server, and no folder."""
    return str(run).startswith(("http:", "https:"))


def write_atomically(path: Path, data: bytes, mode: int = 0o644, *, replace: bool = True) -> None:
    """Write a file whole or not at all, durable on return. A kill, a full disk or a power cut leaves the old one.

    Raises OSError, and FileExistsError if the file exists and `replace` is false.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), mode)
            name_file(file, Path(name), path, replace=replace)
    finally:
        Path(name).unlink(missing_ok=True)


def name_file(file: BinaryIO, written: Path, target: Path, *, replace: bool = True) -> None:
    """Give an open, complete file its name, durable on return. It was written at another path of the same disk.

    Raises OSError, and FileExistsError if the name is taken and `replace` is false. `written` may then still exist.
    """
    file.flush()
    os.fsync(file.fileno())
    if replace:
        os.replace(written, target)
    else:
        os.link(written, target)
    sync_folder(target.parent)


@contextlib.contextmanager
def replaced_folder(target: Path, *, durable: bool = True) -> Iterator[Path]:
    """An empty folder to write into. It replaces `target` after everything is written, or not at all.

    Raises OSError, also from the writer; the old folder is then untouched. See `name_folder` for what a kill leaves.
    Unless `durable`, a power cut may leave a folder with damaged files.
    """
    clear_leftovers(target)
    new = target.with_name(f".{target.name}.new")
    new.mkdir(parents=True)
    try:
        yield new
        name_folder(new, target, durable=durable)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def name_folder(written: Path, target: Path, *, durable: bool = True) -> None:
    """Give a complete folder its name, durable on return unless told otherwise, and delete the folder that had the name.

    A kill leaves the old one, the new one, or, between the two renames, no folder of this name. `clear_leftovers` then puts
    the old one back.
    """
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if durable:
        _sync_below(written)
    if target.exists():
        os.rename(target, old)
    os.rename(written, target)
    if durable:
        sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync_below(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            sync_file(path)
        else:
            sync_folder(path)
    sync_folder(folder)


def sync_file(path: Path) -> None:
    """Make the bytes of a file durable, but not its name."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def clear_leftovers(target: Path) -> None:
    """Delete what a killed replacement of a folder left behind; put the old folder back if it is the only one."""
    new, old = (target.with_name(f".{target.name}.{end}") for end in ("new", "old"))
    if old.exists() and not target.exists():  # guard: old-folder-comes-back
        os.rename(old, target)
    for folder in (new, old):
        shutil.rmtree(folder, ignore_errors=True)


def is_locked(run_dir: Path) -> bool:
    """Whether a launcher or one of its roles holds this folder."""
    try:
        fd = os.open(run_dir / ".lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # locks are not to be had there
    finally:
        os.close(fd)
    return False


@contextlib.contextmanager
def held(lock: Path) -> Iterator[None]:
    """Wait until no other process is in here with this lock file. For short work: a kill lets the next process in."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise StateError(f"{lock.parent} is needed as a folder, and a file has its name: move that away") from None
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def free_below(folder: Path) -> int:
    """Bytes that are free on the disk of a folder, which need not be there yet."""
    return shutil.disk_usage(existing(folder)).free


def held_below(folder: Path, without: str = "") -> int:
    """Bytes of all files below a folder, which may change meanwhile. A file of several names, such as the base of adapters,
    counts once. `without` is the pattern of names that do not count."""
    sizes = {}
    for above, _, files in os.walk(folder):
        for name in files:
            if fnmatchcase(name, without):
                continue
            with contextlib.suppress(FileNotFoundError):
                found = (Path(above) / name).lstat()
                sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())


def existing(folder: Path) -> Path:
    """A folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _secret_of(seed: int) -> bytes:
    """The secret of a run that only this machine takes part in."""
    return domain_hash("fixed seed", seed.to_bytes(8, "big"))


def _with_kinds(
    config: RunConfig, for_others: bool, old: Mapping[str, str], repeatable: Callable[[EnvConfig], bool]
) -> RunConfig:
    """Say who plays each environment where the run file does not: the host, if those who join do not have it, or if nobody
    can repeat it. `old` are the kinds with which a run began, by label: they stay."""

    def kind_of(env: EnvConfig) -> Literal["", "episodes", "completions"]:
        if env.kind:
            return env.kind
        if env.label in old:
            return "completions" if old[env.label] == "completions" else ""
        # The names of files and packages have slashes, dots or colons.
        stays = not env.reproducible or (for_others and not env.name.isidentifier())
        return "completions" if stays or not repeatable(env) else ""

    envs = (msgspec.structs.replace(env, kind=kind_of(env)) for env in config.envs)
    return msgspec.structs.replace(config, envs=tuple(envs))


def _as_found(config: RunConfig, before: RunConfig) -> RunConfig:
    """With what was found when the run began (FOUND), where the run file leaves it open: bits depend on it."""
    for name, key, unset in FOUND:
        section = getattr(config, name)
        if getattr(section, key) == unset:  # guard: found-once
            kept = msgspec.structs.replace(section, **{key: getattr(getattr(before, name), key)})
            config = msgspec.structs.replace(config, **{name: kept})
    return config
