"""What lies below a root, a namespace or an instance directory: collected for `kvdisk inspect`, as plain data.

What must hold:
- Nothing is opened for writing, no lock is taken (not even for a moment: a server that starts would take the next
  instance), no link is followed, and files that are not kvdisk's are named but not opened.
- Which chunks count is decided by recovery itself, so the figures are those of the next start.

What can fail: the directory given cannot be listed (OSError). Anything below it that cannot be read is a finding.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvdisk import layout
from kvdisk.cli.inspect_segments import DAMAGED, UNREADABLE, Looked, Looker, SegmentReport
from kvdisk.directory import CLOSED, HARMLESS
from kvdisk.epoch import read_epoch
from kvdisk.index import GROUP_MAX, LIVE_BYTES_MAX, Index
from kvdisk.instance import INSTANCE_NAME, LEDGER, NAMESPACE_NAME, SEGMENT_NAME, parse_grants
from kvdisk.private_files import no_follow
from kvdisk.recovery import Recovery
from kvdisk.segments import SegmentTable

SCHEMA_VERSION = 1
SMALL_FILE_BYTES_MAX = 4 << 20  # ledger, namespace.json; a real one has a few KiB

ALIVE, CLOSED_CLEANLY, ENDED, UNKNOWN = "alive", "closed", "ended", "unknown"


@dataclass
class GroupReport:
    """One KV cache group's chunks of the current epoch. Sizes in bytes, positions in tokens.

    Attributes:
        group: its id.
        chunk_count: in readable packs.
        usable_count: that a server starting now would find: the newest of their keys.
        stored_bytes, live_bytes: with and without padding.
        position_min, position_max: ends of chunks.
    """

    group: int
    chunk_count: int = 0
    usable_count: int = 0
    live_bytes: int = 0
    stored_bytes: int = 0
    position_min: int = 1 << 63
    position_max: int = 0

    @property
    def ratio(self) -> float:
        """Stored over live."""
        return self.stored_bytes / max(1, self.live_bytes)


@dataclass
class InstanceReport:
    """One instance directory.

    Attributes:
        path: of it.
        owner: ALIVE, CLOSED_CLEANLY, ENDED without closing, or UNKNOWN.
        pid: as its lock says, 0 if it does not.
        granted_bytes: by the root's ledger, 0 if it holds no grant.
        used_bytes: by st_blocks.
        segments: all of them, by number.
        groups: by id.
        foreign: names that are not kvdisk's.
        problems: damage, in words.
    """

    path: str
    owner: str = UNKNOWN
    pid: int = 0
    granted_bytes: int = 0
    used_bytes: int = 0
    segments: list[SegmentReport] = field(default_factory=list)
    groups: list[GroupReport] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class NamespaceReport:
    """One namespace directory.

    Attributes:
        path: of it.
        identity: what its name is a hash of, from namespace.json; None if that cannot be read.
        identity_matches: whether it is.
        epoch: in force; None if a record is damaged.
        after_reset: whether it began with a reset: the next start will not use what was stored since.
    """

    path: str
    identity: dict[str, Any] | None = None
    identity_matches: bool = False
    epoch: int | None = 0
    after_reset: bool = False
    used_bytes: int = 0
    instances: list[InstanceReport] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class Report:
    """What `inspect` was asked to look at."""

    path: str
    used_bytes: int = 0
    granted_bytes: int = 0
    namespaces: list[NamespaceReport] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def all_problems(self) -> list[str]:
        """Of every level."""
        below = [one for n in self.namespaces for one in (n.problems, *(i.problems for i in n.instances))]
        return [*self.problems, *(problem for problems in below for problem in problems)]


class Inspector:
    """Collects a Report. `on_progress` is told which directory is being looked at."""

    def __init__(self, on_progress: Callable[[str], object] = str) -> None:
        self._on_progress = on_progress
        self._looker = Looker()
        self._locks = held_locks()

    def inspect(self, path: str) -> Report:
        """Look at a root, a namespace or an instance directory, whichever `path` is.

        Raises:
            OSError: it cannot be listed.
        """
        path = os.path.realpath(path)
        parent, name = os.path.split(path)
        report = Report(path)
        try:
            if NAMESPACE_NAME.fullmatch(name):
                report.namespaces.append(self._namespace(path, _grants(parent, report)))
            elif NAMESPACE_NAME.fullmatch(os.path.basename(parent)) and INSTANCE_NAME.fullmatch(name):
                grants = _grants(os.path.dirname(parent), report)
                report.namespaces.append(self._namespace(parent, grants, only=name))
            else:
                self._root(path, report)
        finally:
            self._looker.close()
        report.used_bytes += sum(namespace.used_bytes for namespace in report.namespaces)
        instances = [instance for namespace in report.namespaces for instance in namespace.instances]
        report.granted_bytes = sum(instance.granted_bytes for instance in instances)
        return report

    def _root(self, path: str, report: Report) -> None:
        grants = _grants(path, report)
        report.used_bytes = allocated(path) + allocated(os.path.join(path, LEDGER))
        for entry in listed(path):
            if NAMESPACE_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                try:
                    report.namespaces.append(self._namespace(entry.path, grants))
                except OSError as error:
                    report.problems.append(f"{entry.name}: {error.strerror}")
            elif entry.name != LEDGER and entry.name not in HARMLESS:
                report.foreign.append(entry.name)

    def _namespace(self, path: str, grants: dict[str, Any], only: str | None = None) -> NamespaceReport:
        report = NamespaceReport(path)
        name = os.path.basename(path)
        identity_path, epoch_path = os.path.join(path, "namespace.json"), os.path.join(path, "epoch")
        report.used_bytes = sum(map(allocated, (path, identity_path, epoch_path)))
        report.identity = _identity(identity_path)
        report.identity_matches = report.identity is not None and _name_of(report.identity) == name
        record = _epoch(epoch_path)
        if record is None:
            report.problems.append(f"{name}/epoch cannot be read or is damaged: the next start uses nothing of it")
        report.epoch = record.epoch if record else None
        report.after_reset = bool(record and record.after_reset)
        for entry in listed(path):
            if INSTANCE_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                if only in (None, entry.name):
                    granted_bytes = min(grants.get(f"{name}/{entry.name}", {"bytes": 0})["bytes"], 1 << 62)
                    report.instances.append(self._instance(entry.path, name, report, granted_bytes))
            elif entry.name not in ("namespace.json", "epoch"):
                report.foreign.append(entry.name)
        report.used_bytes += sum(instance.used_bytes for instance in report.instances)
        return report

    def _instance(self, path: str, namespace: str, above: NamespaceReport, granted_bytes: int) -> InstanceReport:
        self._on_progress(path)
        report = InstanceReport(path, granted_bytes=granted_bytes)
        report.owner, report.pid = self._owner(os.path.join(path, "lock"))
        report.used_bytes = allocated(path) + allocated(os.path.join(path, "lock"))
        name = f"{namespace}/{os.path.basename(path)}"
        try:
            found = listed(path)
        except OSError as error:
            report.problems.append(f"{name}: {error.strerror}")
            return report
        looked = []
        for entry in found:
            match = SEGMENT_NAME.fullmatch(entry.name)
            if match and entry.is_file(follow_symlinks=False):
                is_owned = report.owner != CLOSED_CLEANLY  # a server in another container shows as one that ended
                looked.append(self._looker.look_at(entry.path, int(match[1]), namespace[3:], is_owned=is_owned))
            elif entry.name != "lock":
                report.foreign.append(entry.name)
        report.segments = [one.report for one in looked]
        report.used_bytes += sum(segment.allocated_bytes for segment in report.segments)
        for segment in report.segments:
            if segment.state in (DAMAGED, UNREADABLE):
                report.problems.append(f"{name}/{segment.number:08d}.seg: {segment.problem}")
        epoch = _epoch_in_force(above, looked)
        report.groups = groups_of(looked, epoch)
        return report

    def _owner(self, path: str) -> tuple[str, int]:
        try:
            info = os.lstat(path)
            with open(path, opener=_look_only, encoding="utf-8", errors="replace") as file:
                said = file.read(64).strip()
        except FileNotFoundError:
            return CLOSED_CLEANLY, 0
        except OSError:
            return UNKNOWN, 0
        word = said.partition(" ")[0]  # see ProcessName
        pid = int(word) if re.fullmatch(r"[0-9]{1,10}", word) else 0
        if self._locks is None or not stat.S_ISREG(info.st_mode):
            return UNKNOWN, pid
        # The device in /proc/locks is the file system's, which is not what stat says on btrfs.
        device = (os.major(info.st_dev), os.minor(info.st_dev))
        for holder, where, inode in self._locks:
            if inode == info.st_ino and (where == device or holder == pid):
                return ALIVE, pid or holder
        return (CLOSED_CLEANLY if said in ("", CLOSED) else ENDED), pid


def _epoch_in_force(above: NamespaceReport, looked: Sequence[Looked]) -> int:
    """As at a start: the highest of the record and of all segments; with a damaged record what there is counts for
    nobody, and is shown all the same."""
    return max([above.epoch or 0, *(one.header.epoch for one in looked if one.header)])


def groups_of(looked: Sequence[Looked], epoch: int) -> list[GroupReport]:
    """The groups of all chunks of this epoch. Which of them are usable, recovery decides."""
    groups: dict[int, GroupReport] = {}
    for one in looked:
        if one.header is None or one.header.epoch != epoch:
            continue
        for chunk in one.scan.chunks.rows(0, len(one.scan.chunks.key)):
            group = groups.get(chunk.group)
            if group is None:
                group = groups[chunk.group] = GroupReport(chunk.group)
            group.chunk_count += 1
            group.live_bytes += chunk.live_bytes
            group.stored_bytes += chunk.stored_bytes
            group.position_min = min(group.position_min, chunk.position)
            group.position_max = max(group.position_max, chunk.position)
    # Every alignment there can be is a multiple of the smallest, so one index serves for segments of any.
    index, table = Index(layout.ALIGNMENT_MIN), SegmentTable((len(looked),))
    Recovery(index, table, lambda group, live, *_: group <= GROUP_MAX and live <= LIVE_BYTES_MAX).take(
        (one.scan for one in looked if one.header), epoch
    )
    for key in index:
        extent = index.get(key)
        assert extent is not None
        groups[extent.group].usable_count += 1
    return sorted(groups.values(), key=lambda group: group.group)


def _can_be_indexed(group: int, live_bytes: int, *_: int) -> bool:
    return group <= GROUP_MAX and live_bytes <= LIVE_BYTES_MAX


def held_locks() -> list[tuple[int, tuple[int, int], int]] | None:
    """(pid, device, inode) of every flock, as /proc/locks has it: asking without taking one. None: it does not say."""
    try:
        with open("/proc/locks", encoding="ascii", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    pattern = re.compile(r"\d+: FLOCK +\S+ +\S+ +(-?\d+) +([0-9a-f]+):([0-9a-f]+):(\d+) ")
    found = (pattern.match(line) for line in lines)
    return [(int(m[1]), (int(m[2], 16), int(m[3], 16)), int(m[4])) for m in found if m]


def listed(path: str) -> list["os.DirEntry[str]"]:
    """What a directory holds, by name."""
    with os.scandir(path) as found:
        return sorted(found, key=lambda entry: entry.name)


def allocated(path: str) -> int:
    """Bytes by st_blocks; 0 if it is not there."""
    try:
        return os.lstat(path).st_blocks * 512
    except OSError:
        return 0


def _look_only(path: str, flags: int) -> int:
    return no_follow(path, flags | os.O_NONBLOCK)


def _read_small(path: str) -> str:
    """A small file's text, or "" if it is missing, strange or large."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return ""
        with open(path, opener=_look_only, encoding="utf-8", errors="replace") as file:
            text = file.read(SMALL_FILE_BYTES_MAX + 1)
    except OSError:
        return ""
    return text if len(text) <= SMALL_FILE_BYTES_MAX else ""


def _grants(root: str, report: Report) -> dict[str, Any]:
    text = _read_small(os.path.join(root, LEDGER))
    grants = parse_grants(text)
    if text and not grants and '"grants": {}' not in text:
        report.problems.append(f"{LEDGER} is damaged; the next start writes it anew")
    return grants


def _epoch(path: str) -> layout.EpochRecord | None:
    try:
        if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            return None
        return read_epoch(path)
    except OSError:
        return None


def _identity(path: str) -> dict[str, Any] | None:
    try:
        identity = json.loads(_read_small(path))
    except (ValueError, RecursionError):
        return None
    return identity if isinstance(identity, dict) else None


def _name_of(identity: dict[str, Any]) -> str:
    """The namespace that belongs to an identity, see Service; "" if it cannot be one."""
    try:
        text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return ""
    return f"ns-{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:32]}"


def facts_of(identity: dict[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Those of an identity's facts that are there, as text."""
    facts = identity.get("facts")
    known = {**(facts if isinstance(facts, dict) else {}), **{k: v for k, v in identity.items() if k != "facts"}}
    return {name: str(known[name]) for name in names if isinstance(known.get(name), (str, int, float, bool))}
