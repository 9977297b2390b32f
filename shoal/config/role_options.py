"""Options of a role's process: what the launcher hands it as one JSON value, and what a user's command sets."""

import msgspec


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user, or the launcher of a run, sets of a worker or a validator."""

    url: str
    home: str
    """Folder of its key, weights and evidence."""
    run_dir: str = ""
    """Folder of the run, if the node is its host's own. Then it plays environments that are files of this machine, and
    trusts the policy's tokenizer and chat template."""
    key_file: str = ""
    """Default: `node.key` in `home`."""
    name: str = ""
    """In the host's table. Default: this machine's; of a host's own node that of its home."""
    threads: int = 1
    device: str = "cpu"
    engine: str = ""
    """Kind of engine that the user chose; empty takes the run's."""
    max_memory_mb: int = 0
    """Of all work for others; 0 is a share of what is free."""
    max_disk_mb: int = 0
    """Of weights and evidence; 0 is a share of what is free."""
    shifts: str = ""
    """Folder in which the processes queue that share the device, if any do."""
    cheat: str = ""
    """How it lies, in demonstrations."""

    @property
    def is_own(self) -> bool:
        """Whether it is a node of the run's host."""
        return bool(self.run_dir)


class TrainerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the launcher sets of its run's trainer, and a trainer of each of its processes."""

    url: str
    shifts: str = ""
    """Folder in which the processes queue that share the device, if any do."""
    meeting: str = ""
    """File at which the processes of a trainer meet."""


class EvalOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the launcher sets of an evaluation of its run."""

    checkpoint: str
    out: str
    one_in: int = 1
    """It plays one in so many of the run's episodes, but MIN_EPISODES if there are so many."""
    threads: int = 1
    shifts: str = ""
    """Folder in which the processes queue that share the device, if any do."""
