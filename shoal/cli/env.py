"""`shoal env init`, `check`, `rate`, `push`, `install`, `attest`, `add-attestation`, `list`, `show`.

Environments are loaded when a command runs. Nothing of a package that somebody else wrote runs here.
"""

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.options import add_command, add_group, env_arguments, positive, set_argument
from shoal.errors import EXIT_NO, ConfigError, cause_of
from shoal.terminal import command, printable, say

if TYPE_CHECKING:
    from shoal.chat.renderer import Renderer
    from shoal.config import RunConfig


def add_commands(commands: Any) -> None:
    p = add_group(commands, "env", "make, check, share and install environments")
    q = add_command(
        p, "init", env_init, "write a new package that you can change",
        "Writes a folder with an environment of 20 lines, its data and environment.toml. It passes `shoal env check`.",
        ("shoal env init ann/backwards", "writes ./backwards"),
    )  # fmt: skip
    q.add_argument("name", metavar="OWNER/NAME", help="what others will call it")
    q.add_argument("--folder", type=Path, metavar="DIR", help="where to write it (default: ./NAME)")
    q = add_command(
        p, "check", env_check, "check that an environment is sound",
        "Plays episodes with its scripted players and with hostile texts, in the sandbox and within a minute. Its "
        "solutions must earn the most and wrong answers little; replays must give the same with another hash seed, at "
        "another time and after other tasks; it must not use network, processes or files. Prints a line for each check; "
        "exit code 1 if one fails.",
        ("shoal env check wordle", ""), ("shoal env check ./my_env.py", "your own file"),
        ("shoal env check ./backwards", "the folder of a package"),
        ("shoal env check my_run.toml", "each environment of a run file or recipe, with its settings"),
    )  # fmt: skip
    env_arguments(q, "env")
    set_argument(q, "run file", "envs.0.args.digits=3")
    q.add_argument(
        "--no-sandbox", action="store_true", help="play it as your own code, with network, as one with a judge needs"
    )
    _registry_argument(q, required=False)
    _add_rate(p)
    _add_sharing(p)
    q = add_command(
        p, "list", env_list, "environments that come with shoal, are installed here, or are in a registry", "",
        ("shoal env list", ""), ("shoal env list --registry https://hub.example.org", ""),
    )  # fmt: skip
    _registry_argument(q, required=False)
    q = add_command(
        p, "show", env_show, "what is known of a package",
        "Prints author, versions, digests and sizes, and whose check the newest or the named version has passed.",
        ("shoal env show ann/backwards --registry https://hub.example.org", ""),
    )  # fmt: skip
    q.add_argument("name", metavar="NAME[@VERSION]", help="OWNER/NAME, of its newest version if none is named")
    _registry_argument(q)


def _add_rate(p: Any) -> None:
    q = add_command(
        p, "rate", env_rate, "rate answers that wait for a person",
        "Shows the answers of a queue one after another and asks for a number from 0 to 10 for each. Several people may "
        "rate at the same time. Each rating is saved at once. At the end it prints how many answers are rated, and how "
        "much the raters agree.",
        ("shoal env rate runs/essays/ratings --name anna", ""),
    )  # fmt: skip
    q.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of the queue")
    q.add_argument("--name", required=True, metavar="RATER", help="your name, so that you rate no answer twice")
    q.add_argument("--raters", type=positive, default=1, metavar="N", help="how many people rate each answer")


def _add_sharing(p: Any) -> None:
    q = add_command(
        p, "push", env_push, "publish a package in a registry",
        "Packs the folder, signs it with your author's key (made at the first push) and writes it into the registry's "
        "folder, which any web server can serve. A version cannot be pushed again with other files.",
        ("shoal env push ./backwards --registry /srv/hub", ""),
        ("shoal env push ./backwards --registry /srv/hub --withdraw 'wrong gold answers'", "advise against this version"),
    )  # fmt: skip
    q.add_argument("folder", type=Path, metavar="DIR", help="the package's folder")
    q.add_argument("--registry", required=True, metavar="DIR", help="the registry's folder; made if missing")
    q.add_argument("--key", type=Path, metavar="FILE", help="the author's key (default: ~/.shoal/author.key)")
    q.add_argument("--withdraw", metavar="WHY", help="advise against this version; it stays published")
    q.add_argument("--new-key", type=Path, metavar="FILE", help="sign with this key from now on; made if missing")
    q = add_command(
        p, "install", env_install, "install a package from a registry",
        "Shows author, size and dependencies and asks once; ~/.shoal/install.toml, if there is one, decides instead. "
        "Dependencies are wheels with the hashes of the package's lock; nothing is built. The code is "
        "tried inside the sandbox.",
        ("shoal env install ann/backwards --registry https://hub.example.org", "the newest version"),
        ("shoal env install ann/backwards@0.1.0 --registry /srv/hub --yes", ""),
    )  # fmt: skip
    q.add_argument("name", metavar="NAME[@VERSION]", help="OWNER/NAME, of its newest version if none is named")
    _registry_argument(q)
    decides = q.add_mutually_exclusive_group()
    decides.add_argument("--yes", action="store_true", help="install without asking, and without install.toml")
    decides.add_argument(
        "--policy", type=Path, metavar="FILE", help="decide by this file (default: install.toml in ~/.shoal)"
    )
    q.add_argument("--heavy", action="store_true", help="allow dependencies such as torch, as on a host")
    q.add_argument(
        "--max-mb",
        type=positive,
        default=1000,
        metavar="MB",
        help="largest package, and largest download of dependencies",
    )
    q.add_argument(
        "--wheels", type=Path, metavar="DIR", help="take dependencies from this folder instead of pip's index"
    )
    q = add_command(
        p, "attest", env_attest, "tell others that a version passes its check here",
        "Runs `shoal env check`. If all passes, it writes that, signed with this machine's node key, into the registry's "
        "folder; or with --out into a file, which you send to the owner of the registry.",
        ("shoal env attest ann/backwards@0.1.0 --registry /srv/hub", "check what is installed"),
        ("shoal env attest ann/backwards@0.1.0 --registry https://hub.example.org --out passed.json", "send this file"),
    )  # fmt: skip
    q.add_argument("name", metavar="NAME@VERSION", help="OWNER/NAME@VERSION")
    q.add_argument("--registry", required=True, metavar="DIR", help="the registry's folder, or with --out also its URL")
    q.add_argument("--out", type=Path, metavar="FILE", help="write into this file, and not into the registry")
    help_text = "check this folder with the version's files (default: what is installed)"
    q.add_argument("--folder", default="", metavar="DIR", help=help_text)
    q = add_command(
        p, "add-attestation", env_add_attestation, "put attestations that others sent you into your registry",
        "Each file is what `shoal env attest --out` wrote. Its signature says who wrote it, and nothing else. A key has "
        "one attestation of a version.",
        ("shoal env add-attestation passed.json --registry runs/wordle/hub", ""),
    )  # fmt: skip
    q.add_argument("files", type=Path, nargs="+", metavar="FILE", help="an attestation")
    q.add_argument("--registry", required=True, metavar="DIR", help="the registry's folder")


def _registry_argument(p: argparse.ArgumentParser, required: bool = True) -> None:
    p.add_argument("--registry", required=required, default="", metavar="URL_OR_DIR", help="where packages come from")


def env_init(args: argparse.Namespace) -> None:
    from shoal.env_packages.scaffold import write_package

    folder = args.folder or Path(args.name.rpartition("/")[2])
    write_package(args.name, folder)
    place = str(folder) if folder.is_absolute() else f"./{folder}"
    print(f"wrote {folder}. Next: {command('env', 'check', place)}")


def env_check(args: argparse.Namespace) -> int:
    from shoal.config import load_run, load_sft, sampling_of
    from shoal.config.env_settings import EnvConfig
    from shoal.config.load import env_at
    from shoal.envs.lint.process_checks import check
    from shoal.typed_toml import read_toml

    is_file, file = args.env.endswith(".toml"), Path(args.env)
    if args.set and not is_file:
        raise ConfigError(
            f"--set {args.set[0]}: {args.env} is no run file or recipe. Give its arguments as --env-args JSON"
        )
    is_recipe = is_file and read_toml(file).keys() & {"env", "envs"} == {"env"}
    config = load_run(file, args.set) if is_file and not is_recipe else None
    named = config.envs if config else [load_sft(file, args.set).env] if is_recipe else []
    envs = [env_at(env, file.parent) for env in named] or [EnvConfig(args.env, args=args.env_args)]
    renderer = _renderer(config, file.parent) if config else None
    policy = (renderer, sampling_of(config)) if config and renderer else None
    failed, waits = False, set[str]()

    def wait(line: str) -> None:
        if line not in waits:  # several processes load the same
            waits.add(line)
            print(printable(line), file=sys.stderr, flush=True)

    for env in envs:
        if is_file:
            say(f"{env.label}:")
        settings = env if is_file else None
        findings = check(env.name, env.args, settings, not args.no_sandbox, args.registry, policy=policy, wait=wait)
        if faults := [finding for finding in findings if finding.outcome == "failed"]:
            if [fault.check for fault in faults] == ["load"]:
                raise ConfigError(faults[0].detail)
            failed = True
        for finding in findings:
            say(f"{finding.outcome:<8} {finding.check}: {finding.detail}")
    return EXIT_NO if failed else 0


def _renderer(config: "RunConfig", beside: Path) -> "Renderer | None":
    """Of a run file's policy; None of one that is not on this machine. Raises `StateError` if the run cannot use it."""
    import tempfile

    from shoal.chat.isolated import open_own
    from shoal.launch.preflight import demand_computable
    from shoal.models.random_model import tiny_spec, write_tokenizer
    from shoal.protocol.hub_reference import is_hub

    if config.policy.path:
        place = beside / config.policy.path
        if is_hub(config.policy.path) or not place.is_dir():
            return None
        demand_computable(place, config)
        return open_own(place)
    with tempfile.TemporaryDirectory() as scratch:
        write_tokenizer(Path(scratch), config.policy.tiny.max_positions)
        (Path(scratch) / "config.json").write_text(json.dumps(tiny_spec(config.policy.tiny).to_hf()))
        return open_own(Path(scratch))


def env_push(args: argparse.Namespace) -> None:
    from shoal.config import node_home
    from shoal.env_packages.archive import index_folder
    from shoal.env_packages.metadata import read_package
    from shoal.env_packages.package_reference import owner_of
    from shoal.env_packages.publish import change_key, push, withdraw
    from shoal.env_packages.registry import own_registry
    from shoal.net.key_files import load_key, load_or_make_key

    home = node_home()
    about = read_package(args.folder, index_folder(args.folder)).about  # before a registry and a key are made
    registry = own_registry(args.registry, make=args.withdraw is None)
    key = load_key(args.key) if args.key else load_or_make_key(home / "author.key")
    if args.new_key:
        new = load_or_make_key(args.new_key)
        change_key(owner_of(about.name), key, new, registry, home)
        print(f"{owner_of(about.name)} signs with {new.public} in this registry from now on")
        print(
            f"when you have done so for each registry, put {args.new_key} in the place of {args.key or home / 'author.key'}"
        )
        return
    if args.withdraw is not None:
        if not args.withdraw.strip():
            raise ConfigError("--withdraw needs a reason for those who installed this version, such as 'wrong answers'")
        withdraw(about.name, about.version, args.withdraw, registry, key, home)
        print(f"withdrawn: {about.name} {about.version}")
        return
    pushed = push(args.folder, registry, key, home)
    print(f"{'published' if pushed.is_new else 'already published:'} {pushed.about.name} {pushed.about.version}")
    print(f"package {pushed.release.digest}, {pushed.release.size_bytes:,} bytes")
    print(f"signed by {key.public}")


def env_install(args: argparse.Namespace) -> None:
    from shoal.cli.install_consent import consent_here
    from shoal.config import node_home
    from shoal.env_packages.attestations import num_witnesses
    from shoal.env_packages.install import by_pip, install
    from shoal.env_packages.package_reference import read_reference
    from shoal.env_packages.registry import open_registry
    from shoal.envs.isolated.environment import try_code
    from shoal.sandbox.selftest import examined

    registry = open_registry(args.registry)
    downloader = by_pip("--no-index", "--find-links", str(args.wheels.absolute())) if args.wheels else None
    consent = consent_here(args.policy, args.yes, args.max_mb, args.heavy)
    result = install(
        read_reference(args.name), registry, node_home(), consent, start=try_code if examined().works else None,
        downloader=downloader, checks=lambda name, release, author: num_witnesses(registry, name, release, author),
        tell=say,
    )  # fmt: skip
    package = result.package
    print(
        f"{'installed' if result.is_new else 'already installed:'} {package.name} {package.version} in {result.folder}"
    )
    if result.is_new:
        say(f"tried inside the sandbox: {result.tried}" if examined().works else f"{result.tried}: {examined().remedy}")
    print(f'in a run file: [[envs]] name = "{package.name}@{package.version}"')


def env_attest(args: argparse.Namespace) -> None:
    import platform

    from shoal.config import node_home
    from shoal.env_packages.attestations import find_release, make_attestation, put_attestation
    from shoal.env_packages.package_reference import read_reference
    from shoal.env_packages.registry import open_registry, own_registry
    from shoal.net.key_files import load_or_make_key
    from shoal.protocol.encoding import to_json
    from shoal.protocol.field_types import fact
    from shoal.run_folder import write_atomically

    reference, home = read_reference(args.name), node_home()
    release = find_release(open_registry(args.registry) if args.out else own_registry(args.registry), reference, home)
    num_checks = _num_passed(args.folder, release.digest)
    machine = fact(f"{platform.system()} {platform.machine()} Python {platform.python_version()}")
    signed = make_attestation(
        reference.name, release, machine, num_checks, load_or_make_key(home / "node.key"), time.time()
    )
    if args.out:
        write_atomically(args.out, to_json(signed))
        file = shlex.quote(str(args.out))
        print(f"wrote {args.out}: send it to the owner of the registry, for `shoal env add-attestation {file}`")
    else:
        put_attestation(own_registry(args.registry), reference.name, release, signed)
        print(f"attested {reference.name} {release.version}: passed {num_checks} checks")


def _num_passed(folder: str, digest: str) -> int:
    """Checks that pass on a folder, or on the installed package, which runs in the sandbox. Raises `ConfigError` if one
    fails."""
    from shoal.envs.lint.process_checks import check
    from shoal.envs.load import env_digest

    path = str(Path(folder).absolute()) if folder else f"pkg:{digest}"
    if env_digest(path) != digest:
        raise ConfigError(f"{folder} does not have the files of this version: check the folder that was pushed")
    findings = check(path, {})
    if failed := [
        finding.check for finding in findings if finding.outcome == "failed"
    ]:  # guard: only-passes-are-attested
        raise ConfigError(f"nothing is attested, because {', '.join(failed)} failed: `shoal env check` says why")
    return sum(finding.outcome == "passed" for finding in findings)


def env_add_attestation(args: argparse.Namespace) -> None:
    from shoal.config import node_home
    from shoal.env_packages.attestations import find_release, open_attestation, put_attestation
    from shoal.env_packages.package_reference import read_reference
    from shoal.env_packages.registry import own_registry

    registry = own_registry(args.registry)
    for file in args.files:
        try:
            with file.open("rb") as opened:
                signed, found = open_attestation(opened.read(1 << 16))
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {cause_of(error)}") from None
        reference = read_reference(f"{found.name}@{found.version}")
        put_attestation(registry, found.name, find_release(registry, reference, node_home()), signed)
        say(
            f"{found.name} {found.version}, key {signed.key[:16]}…: passed {found.num_checks} checks on {found.machine}"
        )


def env_list(args: argparse.Namespace) -> None:
    from shoal.config import node_home
    from shoal.env_packages.installed import PackageStore
    from shoal.env_packages.registry import names_of, open_registry
    from shoal.envs.load import BUILT_IN, load_env

    if args.registry:
        for name in names_of(open_registry(args.registry)):
            print(name)
        return
    for name in sorted(BUILT_IN):
        env = load_env(name, {})
        about = (sys.modules[type(env).__module__].__doc__ or "").split("\n", 1)[0].partition(": ")[2]
        print(f"{name:<12} {env.num_tasks:>9,} tasks, {env.num_heldout:>6,} held out   {about}")
    for package in PackageStore(node_home() / "envs").all():
        say(f"{package.name}@{package.version}   package {package.digest[:16]}…, key {package.author[:16]}…")


def env_show(args: argparse.Namespace) -> None:
    from shoal.config import node_home
    from shoal.env_packages.attestations import lines_of, read_attestations
    from shoal.env_packages.package_reference import owner_of, read_reference
    from shoal.env_packages.publish import read_catalogue
    from shoal.env_packages.registry import open_registry
    from shoal.env_packages.signed_catalog import PinnedKeys

    reference, registry = read_reference(args.name), open_registry(args.registry)
    believed = read_catalogue(registry, reference.name, PinnedKeys(node_home() / "authors.json"), pin=False)
    opened = believed.opened
    seen = "not seen on this machine before" if believed.is_new_owner else "known here"
    print(f"{reference.name}, by {owner_of(reference.name)}, key {opened.key} ({seen})")
    for release in opened.catalogue.releases:
        day = time.strftime("%Y-%m-%d", time.gmtime(min(release.created, 1 << 36)))
        gone = f"   withdrawn: {release.withdrawn}" if release.withdrawn else ""
        say(f"{release.version:<12} {day} {release.size_bytes:>12,} bytes   {release.digest}{gone}")
    shown = opened.catalogue.release(reference.version)
    if shown is None and not reference.version and opened.catalogue.releases:
        shown = opened.catalogue.releases[-1]
    if shown is None:
        raise ConfigError(opened.catalogue.lacks(reference.version))
    print(f"attestations of {shown.version}:")
    for line in lines_of(read_attestations(registry, reference.name, shown), opened.key) or ["none"]:
        print(f"  {printable(line)}")


def env_rate(args: argparse.Namespace) -> None:
    from shoal.graders.human_ratings import TOP, Ratings

    if not args.folder.is_dir():
        raise ConfigError(f"{args.folder} is not a folder of answers to rate: give the one that your environment fills")
    ratings = Ratings(args.folder, args.raters)
    while (item := ratings.take(args.name)) is not None:
        say(f"--- question ---\n{item.question}\n--- answer ---\n{item.answer}\n---")
        while (said := _asked(f"0 to {TOP}, or q to stop: ")) not in ("q", None):
            if said.isdecimal() and said.isascii() and len(said) < 3 and int(said) <= TOP:
                ratings.rate(item.id, args.name, int(said))
                break
            print(f"{said[:20]!r} is not a whole number from 0 to {TOP}")
        if said in ("q", None):
            break
    standing = ratings.standing()
    agreed = "" if standing.kappa is None else f", kappa between raters {standing.kappa:.2f}"
    print(f"{standing.rated} of {standing.items} answers are rated, with {standing.ratings} ratings{agreed}")


def _asked(prompt: str) -> str | None:
    """What a person types; None at the end of the input."""
    try:
        return input(prompt).strip()
    except EOFError:
        return None
