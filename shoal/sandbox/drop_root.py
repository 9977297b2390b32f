"""Our last program outside a sandbox: it gives up root, and becomes bubblewrap.

`sandbox/bubblewrap` starts it as a file, in a separate process, because the node could not undo these changes in its
own. It imports the standard library only. Its argument is JSON: `groups` (files of control groups to enter), `user` (which
root becomes, else null), `sources` (paths that the sandbox shows) and `command`, in which each `@N@` is replaced with
the N-th source.

An ordinary user cannot reach an interpreter in /root. So root first binds the sources below a new /tmp, which only this
process and its children see.
"""

import ctypes
import json
import os
import re
import stat
import sys

CLONE_NEWNS = 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 1 << 18
STAGE = "/tmp"

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    task = json.loads(sys.argv[1])
    for group in task["groups"]:
        with open(group, "w") as file:
            file.write(str(os.getpid()))
    sources = task["sources"]
    if task["user"] is not None:
        sources = staged(sources)
        os.setgroups([])
        os.setresgid(task["user"], task["user"], task["user"])
        os.setresuid(task["user"], task["user"], task["user"])  # guard: root-becomes-a-user
    command = [re.sub(r"@(\d+)@", lambda place: sources[int(place[1])], word) for word in task["command"]]
    os.umask(0o022)
    os.execv(command[0], command)


def staged(sources: list[str]) -> list[str]:
    """Bind the sources and return their new places. They are opened first, because the new /tmp may hide them."""
    if libc.unshare(CLONE_NEWNS):
        return sources  # a container without that right; bubblewrap reports what is missing
    mount("none", "/", MS_REC | MS_PRIVATE)
    opened = [os.open(source, os.O_PATH) for source in sources]
    mount("tmpfs", STAGE, 0, "tmpfs", "mode=755")
    places = []
    for number, descriptor in enumerate(opened):
        place = f"{STAGE}/{number}"
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.mkdir(place)
        else:
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY))
        mount(f"/proc/self/fd/{descriptor}", place, MS_BIND)
        os.close(descriptor)
        places.append(place)
    return places


def mount(source: str, place: str, flags: int, kind: str = "", options: str = "") -> None:
    if libc.mount(source.encode(), place.encode(), kind.encode() or None, flags, options.encode() or None):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot mount {source}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
