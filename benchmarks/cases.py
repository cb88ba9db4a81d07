"""List the cases in a table, with who is measured and with which settings."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.run.states import DAMAGED, EMPTY, LARGE_STALL, ONE_GB, SMALL_TENSORS, STALL, StateSpec

__all__ = ["CASES", "Case", "Column", "Entry"]

COPIED = "reads what FsspecWriter wrote"


@dataclass(frozen=True)
class Entry:
    """One row of a case.

    Attributes:
        name: the row's name in tables and plots.
        contender: as `benchmarks.contenders` names it.
        note: the settings it runs at, for the reader.
        peer: whether it runs in the peers' environment.
        job: another job than the case's.
        threads: 0 leaves the number to the contender; -1 is the number that this library takes by
            default.
        options: the contender's settings.
        parameters: the job's.
        full_only: left out of the quick run.
        written_by: for loads, the entry of this case that prepares the checkpoint; by default
            itself.
    """

    name: str
    contender: str
    note: str
    peer: bool = False
    job: str = ""
    threads: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    written_by: str = ""
    full_only: bool = False


@dataclass(frozen=True)
class Column:
    """A figure in a table: its key, its heading, and how many digits follow the point."""

    key: str
    heading: str
    digits: int = 2


@dataclass(frozen=True)
class Case:
    """One table.

    Attributes:
        name: short, for `--only` and file names.
        title: what is measured.
        job: what each entry does.
        entries: the rows.
        columns: the figures shown; the first is what the plot shows.
        state: what is saved or loaded.
        server: "sink", "slow" (it takes 150 MB/s), "keep", "tls", "rclone", or "" for local files.
        prepare: the job that makes what is then loaded; `prepare_parameters` are its own.
        rounds: at most so many, where counts or sizes are what matters; 0 is as many as the run
            has.
        peer_rounds: the same for peers, which are far enough away for one measurement to tell.
        full_only: left out of the quick run.
    """

    name: str
    title: str
    job: str
    entries: tuple[Entry, ...]
    columns: tuple[Column, ...]
    state: StateSpec = EMPTY
    server: str = ""
    prepare: str = ""
    prepare_parameters: dict[str, int] = field(default_factory=dict)
    rounds: int = 0
    peer_rounds: int = 0
    full_only: bool = False

    def quick(self) -> Case:
        """Return the case as the quick run has it."""
        entries = tuple(entry for entry in self.entries if not entry.full_only)
        return replace(self, entries=entries, peer_rounds=1)


_CPU, _WALL = Column("cpu_s_per_gb", "CPU s/GB", 3), Column("wall_s", "wall s", 3)
_RATE, _PEAK = Column("gb_per_s", "GB/s"), Column("peak_mb", "extra peak MB", 0)
_REQUESTS = Column("requests", "requests", 0)
_S3 = (_CPU, _WALL, _RATE, _PEAK, _REQUESTS, Column("server_cpu_s", "server CPU s"))
_FILES = (_CPU, _WALL, _RATE, _PEAK)
_READS = (
    Column("read_per_needed", "bytes read / needed", 3),
    Column("data_read_per_needed", "data read / needed", 3),
    Column("read_bytes", "bytes read", 0),
    _REQUESTS,
    Column("wall_s", "wall s", 3),
    _PEAK,
)

_OURS = Entry("ours", "ours", "defaults")
_OURS_FIRST = replace(
    _OURS, name="ours, first save", note="looks at all it writes, not at a sample", options={"first": True}
)
_OURS_OFF = Entry(
    "ours, no checksums",
    "ours",
    "block checksums replaced by a function that returns 0, and none sent",
    options={"checksums": False},
)
_OURS_UNVERIFIED = Entry(
    "ours, not verified", "ours", "verify=False", options={"verify": False}, written_by="ours"
)
_SOCKETS = Entry("plain sockets", "sockets", "floor: 32 MiB objects on 4 connections, framing by hand")
_WITH_CRC = "the same, and the CRC64NVME of every block"
_SOCKETS_CRC = replace(_SOCKETS, name="plain sockets + CRC", note=_WITH_CRC, options={"checksums": True})
_S3TC_NOTE = "S3ClientConfig defaults (8 MiB parts; larger parts and targets were not better)"
_FSSPEC_NOTE = "payload signing and botocore's checksums off"
_MSC_RUST = {"provider": {"rust_client": {"allow_http": True}}}
_S3_PEERS = (
    Entry("FsspecWriter + s3fs", "fsspec", f"1 thread; {_FSSPEC_NOTE}", peer=True),
    Entry(
        "FsspecWriter + s3fs, 4 threads",
        "fsspec",
        f"4 files; {_FSSPEC_NOTE}",
        peer=True,
        threads=4,
        full_only=True,
    ),
    Entry("s3torchconnector", "s3torchconnector", f"1 thread; {_S3TC_NOTE}", peer=True),
    Entry(
        "s3torchconnector, 4 threads",
        "s3torchconnector",
        f"4 files; {_S3TC_NOTE}",
        peer=True,
        threads=4,
        full_only=True,
    ),
    Entry("multi-storage-client", "msc", "its Rust client", peer=True, options=_MSC_RUST),
    Entry("multi-storage-client, Python", "msc", "without its Rust client", peer=True, full_only=True),
)
_S3_READERS = (
    Entry("FsspecReader + s3fs", "fsspec", _FSSPEC_NOTE, peer=True),
    Entry(
        "s3torchconnector",
        "s3torchconnector",
        f"dcp_optimized reader (default); {_S3TC_NOTE}; {COPIED}",
        peer=True,
        written_by="FsspecReader + s3fs",
    ),
    Entry(
        "multi-storage-client",
        "msc",
        f"defaults (its Rust client was 15 times slower here); {COPIED}",
        peer=True,
        written_by="FsspecReader + s3fs",
    ),
)
_META = Entry(
    "torch_checkpointing", "torch_checkpointing", "one item; direct I/O off (fails on ext4); no fsync",
    peer=True,
)  # fmt: skip
_META_SPLIT = Entry(
    "torch_checkpointing, 4 threads", "torch_checkpointing",
    "an item per tensor, 4 threads; direct I/O off (fails on ext4); no fsync", peer=True, threads=4,
)  # fmt: skip


_RAW = "its bytes alone: an object per tensor, 8 at a time, no metadata, no checksum, no commit"
_OBSTORE = Entry("obstore, raw", "obstore", f"floor of a compiled client; {_RAW}", peer=True)
_S3DLIO = Entry("s3dlio, raw", "s3dlio", _RAW, peer=True)
_RUNAI = Entry(
    "runai-model-streamer", "runai", "8 safetensors files, concurrency 8; copied into the tensors", peer=True
)
_S3_RAW = (_OBSTORE, _S3DLIO)
_COPIED_IN = "copied into the tensors"
_SAFETENSORS = Entry("safetensors", "safetensors", f"save_file, load_file; {_COPIED_IN}", peer=True)
_TORCH_FILE = Entry("torch.save, torch.load", "torch_files", f"weights_only; {_COPIED_IN}")
_TORCH_MMAP = Entry(
    "torch.load, mmap",
    "torch_files",
    f"weights_only, mmap=True; {_COPIED_IN}",
    options={"mmap": True},
    written_by="torch.save, torch.load",
)
_FAST = Entry(
    "fastsafetensors", "fastsafetensors", f"4 shards, 4 threads; CPU, nogds; {_COPIED_IN}", peer=True
)
_FAST_FSYNC = replace(_FAST, options={"fsync": True}, note="4 shards, 4 threads; fsync=True")
_ORBAX = Entry("Orbax", "orbax", f"StandardCheckpointer of numpy arrays, defaults; {_COPIED_IN}", peer=True)
_META_DIRECT = Entry(
    "torch_checkpointing, direct I/O", "torch_checkpointing", "an item per tensor, 4 threads, its default: direct I/O",
    peer=True, threads=4, options={"direct": True},
)  # fmt: skip
_FILE_PEERS = (_TORCH_FILE, _SAFETENSORS, _FAST, _ORBAX)
_FILE_LOADERS = (_TORCH_FILE, _TORCH_MMAP, _SAFETENSORS, _FAST, _RUNAI, _ORBAX)


def _stock(fsync: bool) -> tuple[Entry, ...]:
    return tuple(
        Entry(
            f"stock, {threads} thread{'s' if threads > 1 else ''}",
            "stock",
            f"FileSystemWriter(thread_count={threads}, sync_files={fsync})",
            threads=threads,
            options={"fsync": fsync},
            full_only=threads == 1 and fsync,
        )
        for threads in (1, 2, 4)
    )


_OURS_NO_FSYNC = Entry(
    "ours", "ours", "storage_options={'fsync': False}", options={"storage": {"fsync": False}}
)
_WRITE = Entry("os.write", "files", "floor: as many files and threads as ours", threads=-1)
_WRITE_FSYNC = Entry(
    "os.write + fsync", "files", "floor: as many files and threads as ours; files and directory synced",
    threads=-1, options={"fsync": True},
)  # fmt: skip
_READINTO = Entry("readinto", "files", "floor: as many files and threads as ours", threads=-1)
_WRITE_CRC = replace(_WRITE, name="os.write + CRC", note=_WITH_CRC, options={"checksums": True})
_READINTO_CRC = replace(_READINTO, name="readinto + CRC", note=_WITH_CRC, options={"checksums": True})


_MANAGED = (
    Entry("manager, thread", "managed", "CheckpointManager.save", options={"mode": "thread"}, parameters={"saves": 1}),
    Entry("manager, process", "managed", "CheckpointManager.save, async_mode='process'",
          options={"mode": "process"}, parameters={"saves": 1}),
)  # fmt: skip


def _with(*entries: Entry, **parameters: int) -> tuple[Entry, ...]:
    return tuple(replace(entry, parameters=parameters) for entry in entries)


def _metadata(ranks: int, *, full_only: bool = False) -> Case:
    parameters = {"ranks": ranks}
    return Case(
        f"metadata-{ranks}",
        f"Metadata of {ranks:,} ranks x 500 tensors, committed and opened in one process each",
        "commit",
        (
            Entry(
                "ours",
                "ours",
                "CheckpointWriter.finish; a .metadata that is too large is left out (0.00 MB)",
                parameters=parameters,
            ),
            Entry("stock", "stock", "FileSystemWriter.finish; readers unpickle", parameters=parameters),
        ),
        (
            Column("opened_mb", "opened MB"),
            Column("dot_metadata_mb", ".metadata MB"),
            Column("commit_s", "commit s"),
            Column("open_s", "open s"),
            Column("adopt_s", "open from rank 0 s"),
            Column("shared_mb", "sent by rank 0 MB"),
            Column("open_peak_mb", "open: extra peak MB", 0),
        ),
        rounds=1,
        full_only=full_only,
    )


_STALLS = (
    Entry("memcpy, warm", "files", "floor: copy_, the second into the same memory", job="copy", parameters={"warm": 1}),
    Entry("memcpy, cold", "files", "clone into fresh memory", job="copy", parameters={"warm": 0}),
    _OURS, *_MANAGED,
    Entry("stock, DefaultStager kept", "stock", "one DefaultStager for all saves", options={"keep_stager": True}),
    Entry("stock", "stock", "dcp.async_save, defaults", full_only=True),
    Entry("torch_checkpointing", "torch_checkpointing",
          "staging in a thread; until its copy is done; pinned memory off (no CUDA)",
          peer=True, options={"asynchronous": True}),
)  # fmt: skip
_STALL_COLUMNS = (_WALL, Column("first_s", "first save s", 3), Column("cpu_s", "CPU s", 3), _PEAK)


CASES = (
    Case("s3-save", "S3 save, 1 GB in 60 tensors, http, to an endpoint that drops it", "save",
         (_SOCKETS, _SOCKETS_CRC, _OURS, _OURS_FIRST, _OURS_OFF, *_S3_RAW, *_S3_PEERS), _S3, ONE_GB, "sink"),
    Case("s3-load", "S3 load, verified, 1 GB in 60 tensors, http, from memory", "load",
         (_SOCKETS, replace(_SOCKETS_CRC, written_by="plain sockets"), _OURS, _OURS_UNVERIFIED, *_S3_RAW, _RUNAI,
          *_S3_READERS),
         _S3, ONE_GB, "keep", "prepare"),
    Case("s3-save-tls", "S3 save over TLS, 1 GB in 60 tensors: what checksums cost", "save",
         (_SOCKETS, _SOCKETS_CRC, _OURS, _OURS_FIRST, _OURS_OFF, *_S3_RAW, _S3_PEERS[0]), _S3, ONE_GB, "tls"),
    Case("s3-load-tls", "S3 load over TLS, 1 GB in 60 tensors", "load",
         (_SOCKETS, replace(_SOCKETS_CRC, written_by="plain sockets"), _OURS, _OURS_UNVERIFIED, *_S3_RAW, _RUNAI,
          _S3_READERS[0]), _S3, ONE_GB, "tls-keep", "prepare", full_only=True),
    Case("rclone-load", "S3 load, verified, 1 GB in 60 tensors, from `rclone serve s3`", "load",
         (_OURS, *_S3_READERS), _FILES, ONE_GB, "rclone", "prepare", full_only=True),
    Case("posix-save", "POSIX save without fsync, 1 GB in 60 tensors", "save",
         (_WRITE, _WRITE_CRC, _OURS_NO_FSYNC, *_stock(False), replace(_META, full_only=True), _META_SPLIT,
          replace(_META_DIRECT, full_only=True), *_FILE_PEERS), _FILES, ONE_GB),
    Case("posix-save-fsync", "POSIX save with fsync, 1 GB in 60 tensors", "save",
         (_WRITE_FSYNC, _OURS, _OURS_FIRST, *_stock(True), _FAST_FSYNC), _FILES, ONE_GB),
    Case("posix-load", "POSIX load, verified, warm, 1 GB in 60 tensors", "load",
         (_READINTO, replace(_READINTO_CRC, written_by="readinto"), _OURS, Entry("stock", "stock", "FileSystemReader"), _META, replace(_META_SPLIT, full_only=True),
          *_FILE_LOADERS),
         _FILES, ONE_GB, prepare="prepare"),
    Case("posix-load-cold", "POSIX load, verified, cold: nothing in the page cache, 1 GB in 60 tensors", "load_cold",
         (_READINTO, replace(_READINTO, name="O_DIRECT", note="floor: past the page cache", written_by="readinto",
                             options={"direct": True}),
          _OURS, Entry("stock", "stock", "FileSystemReader"), _META, *_FILE_LOADERS),
         _FILES, ONE_GB, prepare="prepare"),
    Case("damage-files", "One byte of the largest file is flipped: is the load refused?", "load_damaged",
         (_OURS, Entry("stock", "stock", "FileSystemReader"), _META, *_FILE_LOADERS),
         (Column("refused", "refused (1) or loaded wrong (0)", 0),), DAMAGED, rounds=1),
    Case("damage-s3", "The same in a bucket", "load_damaged",
         (_OURS, _RUNAI, Entry("FsspecReader + s3fs", "fsspec", _FSSPEC_NOTE, peer=True),
          Entry("s3torchconnector", "s3torchconnector", _S3TC_NOTE, peer=True),
          Entry("multi-storage-client", "msc", "defaults", peer=True)),
         (Column("refused", "refused (1) or loaded wrong (0)", 0),), DAMAGED, "keep", rounds=1),
    Case("small-tensors", "POSIX save of 20,000 tensors of 4 KB, no fsync", "save",
         (Entry("planner alone", "stock", "floor: DefaultSavePlanner, no storage", job="plan_save"),
          _OURS_NO_FSYNC, *(replace(entry, full_only=entry.threads > 1) for entry in _stock(False)),
          replace(_META, full_only=True)),
         (Column("cpu_s", "CPU s", 3), _WALL, _PEAK), SMALL_TENSORS),
    Case("reshard", "Reshard 8 -> 3 ranks, 4 tensors of 64 MiB: bytes read", "load_sharded",
         _with(_OURS, *_S3_READERS, ranks=3), _READS, StateSpec(4, 4096, 4096), "keep",
         "save_sharded", {"ranks": 8}, rounds=1),
    Case("slice", "256 KiB of rows out of a 16 MiB shard: bytes read", "load_sharded",
         _with(_OURS, *_S3_READERS, ranks=1, rows=16), _READS, StateSpec(1, 8192, 4096), "keep",
         "save_sharded", {"ranks": 8}, rounds=1),
    Case("async-stall", "async_save of 512 MB of CPU state: how long the second one, and the first, keep the trainer", "async_save",
         _STALLS, _STALL_COLUMNS, STALL),
    Case("async-stall-large", "async_save of 2 GB of CPU state", "async_save", _STALLS, _STALL_COLUMNS, LARGE_STALL,
         full_only=True),
    Case("async-steps", "Training steps on one core while 512 MB are saved to S3 from the other; the server takes 150 MB/s",
         "steps",
         (Entry("no save", "managed", "floor: the steps alone, in as many parts", parameters={"saves": 0}), *_MANAGED),
         (Column("slower_percent", "slower %"), Column("mean_step_ms", "mean step ms"), Column("alone_ms", "alone, mean ms"),
          Column("step_ms", "median step ms"), Column("slow_step_ms", "slowest 1 % ms"), Column("steps", "steps", 0)),
         STALL, "slow", rounds=3),
    _metadata(8, full_only=True), _metadata(64), _metadata(256, full_only=True), _metadata(1024), _metadata(4096, full_only=True),
)  # fmt: skip
