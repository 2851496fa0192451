"""Faults planted in the interpreter's PTX, to see whether executing it finds them. A fault counts as found if the
emulator reports something or if results are wrong. Each was tried in one step: all were found except NOT_FOUND, and
"loads go to the page's second half", which ends the emulator's process."""

from collections.abc import Iterator

import ptx_steps
from ptx_code import Fault
from ptx_world import Emulator

from megakernel.errors import MegakernelError

_WAIT = r"mbarrier\.try_wait\S+ (\S+),.*"
_TRUE = r"setp.eq.u32 \1, 0, 0"
_RELEASE, _RELAXED = r"red\.release", "red.relaxed"
_LOADED = r"(cp\.async\.bulk\S*mbarrier::complete_tx::bytes\S*) "
_SYNC = r"bar\.warp\.sync.*"

# The kind of build, what the fault is, and where.
FAULTS: tuple[tuple[str, str, Fault], ...] = (
    # -- memory order
    ("dots", "signals release nothing", Fault("counters.h", "p.signal(told.first, 1, scope_)", _RELEASE, _RELAXED)),
    ("tensor", "an item's signals release nothing", Fault("pages.h", "signal_item(", _RELEASE, _RELAXED)),
    (
        "tensor",
        "waits for counters acquire nothing",
        Fault("device.cuh", "load_acquire(need.value", r"ld\.acquire", "ld.relaxed"),
    ),
    (
        "dots",
        "the last item of a split acquires nothing",
        Fault("attention.h", "p_.arrive_acq_rel(", r"atom\.acq_rel\.gpu", "atom"),
    ),
    (
        "tensor",
        "waits for barriers acquire nothing",
        Fault(
            "device.cuh",
            "bool held = try_wait<kBlocks>(b, parity)",
            r"try_wait\.parity\.acquire",
            "try_wait.parity.relaxed",
        ),
    ),
    (
        "tensor",
        "arrivals at ready release nothing",
        Fault("pages.h", "p_.arrive(block_.ready", r"arrive\.release", "arrive.relaxed"),
    ),
    (
        "dots",
        "releases of pages release nothing",
        Fault("block.h", "p.arrive(block.empty[slot], count)", r"arrive\.release", "arrive.relaxed"),
    ),
    (
        "tensor",
        "the controller's arrivals release nothing",
        Fault("controller.h", "p_.hand_over_at(sm, slot.fetched)", r"arrive\.release", "arrive.relaxed"),
    ),
    # -- lanes of a warp
    ("tensor", "no syncwarp before an output page is ready", Fault("pages.h", "p_.arrive(block_.ready", _SYNC)),
    ("dots", "no syncwarp before the outputs are complete", Fault("consumer.h", "p.arrive(slot.outputs)", _SYNC)),
    ("dots", "no syncwarp before a page is released", Fault("block.h", "p.arrive(block.empty[slot], count)", _SYNC)),
    (
        "tensor",
        "no syncwarp before a task is handed over",
        Fault("controller.h", "p_.hand_over_at(sm, slot.fetched)", _SYNC),
    ),
    (
        "tensor",
        "no syncwarp after waits for counters",
        Fault("loaders.h", "wait_words(p, params, block.dims, task)", _SYNC),
    ),
    ("tensor", "no syncwarp after waits for stores", Fault("storer.h", "if (stored) p.wait_stores()", _SYNC)),
    (
        "dots",
        "lane 1 skips a shuffle",
        Fault(
            "device.cuh",
            "return __shfl_sync(0xFFFFFFFFu, taken, 0)",
            r"shfl\.sync\.idx\.b32 (%\w+)\S*, (\S+),.*",
            r"mov.b32 \1, \2",
        ),
    ),
    # -- proxies
    ("dots", "consumers do not fence their stores", Fault("consumer.h", "p.fence_async()", r"fence\.proxy\.async.*")),
    (
        "tensor",
        "attention does not fence its stores",
        Fault("attention.h", "p_.fence_async()", r"fence\.proxy\.async.*"),
    ),
    (
        "dots",
        "consumers do not fence their reads of pages",
        Fault("pages.h", "if (generic_) p_.fence_pages()", r"fence\.proxy\.async.*"),
    ),
    (
        "tensor",
        "consumers do not fence output pages",
        Fault("pages.h", "    p_.fence_pages()", r"fence\.proxy\.async.*"),
    ),
    (
        "tensor",
        "tensor maps are not acquired",
        Fault("roles.h", "p.acquire_map(params.maps[i])", r"fence\.proxy\.tensormap.*"),
    ),
    (
        "tensor",
        "no fence after the initialisation of barriers",
        Fault("roles.h", "p.sync_block()", r"fence\.mbarrier_init.*"),
    ),
    # -- waits
    ("tensor", "consumers do not wait for pages", Fault("pages.h", "p_.wait(block_.full[page.slot]", _WAIT, _TRUE)),
    ("dots", "loaders do not wait for empty pages", Fault("loaders.h", "p.wait(block.empty[at.slot]", _WAIT, _TRUE)),
    (
        "tensor",
        "the storer does not wait for output pages",
        Fault("storer.h", "p.wait(block.ready[at.slot]", _WAIT, _TRUE),
    ),
    ("dots", "the storer does not wait for outputs", Fault("storer.h", "p.wait(slot.outputs", _WAIT, _TRUE)),
    ("dots", "consumers do not wait for inputs", Fault("consumer.h", "p.wait(slot.inputs", _WAIT, _TRUE)),
    (
        "tensor",
        "the parity of pages is always 0",
        Fault("block.h", "n / kPages & 1", r"and\.b32 (\S+), (\S+), 1$", r"and.b32 \1, \2, 0"),
    ),
    (
        "tensor",
        "stores are not waited for",
        Fault("device.cuh", "cp.async.bulk.wait_group 0", r"cp\.async\.bulk\.wait_group 0"),
    ),
    (
        "tensor",
        "a page is released while it is stored",
        Fault("device.cuh", "cp.async.bulk.wait_group.read 0", r"cp\.async\.bulk\.wait_group\.read 0"),
    ),
    (
        "tensor",
        "stores are not committed",
        Fault("device.cuh", "cp.async.bulk.commit_group", r"cp\.async\.bulk\.commit_group"),
    ),
    (
        "tensor",
        "results are read before wgmma has ended",
        Fault(
            "wgmma.cuh", "wgmma.wait_group", r"wgmma\.wait_group\.sync\.aligned 0", "wgmma.wait_group.sync.aligned 1"
        ),
    ),
    (
        "tensor",
        "pages are released while wgmma reads them",
        Fault(
            "wgmma.cuh", "wgmma.wait_group", r"wgmma\.wait_group\.sync\.aligned 1", "wgmma.wait_group.sync.aligned 2"
        ),
    ),
    ("tensor", "no wgmma.fence", Fault("wgmma.cuh", "wgmma.fence", r"wgmma\.fence.*")),
    (
        "dots",
        "consumers do not meet before they exchange values",
        Fault("call.h", "p_.consumer_sync()", r"bar\.sync.*"),
    ),
    (
        "dots",
        "the barrier of consumers expects another warp",
        Fault("device.cuh", "bar.sync 1, %0", r"bar\.sync 1, 256", "bar.sync 1, 288"),
    ),
    ("dots", "blocks do not meet after their set-up", Fault("roles.h", "p.sync_block()", r"bar\.sync 0")),
    # -- counts and addresses
    (
        "tensor",
        "a page expects no bytes",
        Fault(
            "loaders.h",
            "p.expect(full, bytes)",
            r"mbarrier\.arrive\.expect_tx\.release\.cta\.shared::cta\.b64 (\S+), (\[[^\]]+\]), \S+",
            r"mbarrier.arrive.release.cta.shared::cta.b64 \1, \2, 1",
        ),
    ),
    (
        "tensor",
        "full is complete after one loader",
        Fault("roles.h", "p.init(block.full[i], 2)", r"(mbarrier\.init\S* \S+), .*", r"\1, 1"),
    ),
    (
        "tensor",
        "signals go to the next counter",
        Fault("counters.h", "p.signal(told.first, 1, scope_)", r"(red\S+ \[%\w+)\]", r"\1+4]"),
    ),
    ("dots", "signals are sent twice", Fault("counters.h", "p.signal(told.first, 1, scope_)", r"(red\..*)", r"\1; \1")),
    (
        "tensor",
        "the coordinates of tiles are exchanged",
        Fault("loaders.h", "p.load_tile(to, map, x, y, use.z, full)", r"\{(\S+), (\S+), (\S+)\}", r"{\2, \1, \3}"),
    ),
    (
        "dots",
        "columns come from the next row of the map",
        Fault(
            "loaders.h", "p.load_columns(page, map", r"\{(\S+), (\S+), (\S+), (\S+), (\S+)\}", r"{\1, \2, \4, \3, \5}"
        ),
    ),
    (
        "tensor",
        "loads go to the page's second half",
        Fault("loaders.h", "load_tile(page, use.x, use.y)", _LOADED + r"\[(%\w+)\]", r"\1 [\2+4096]"),
    ),
    ("tensor", "pages of weights are not loaded", Fault("loaders.h", "load_tile(page, use.x, use.y)", r"cp\.async.*")),
    (
        "tensor",
        "residuals are stored, not added",
        Fault(
            "storer.h",
            "p.add_tile(map(d.rank)",
            r"cp\.reduce\.async\.bulk\.tensor\.3d\.global\.shared::cta\.add",
            "cp.async.bulk.tensor.3d.global.shared::cta",
        ),
    ),
    # -- tensor cores and registers
    (
        "tensor",
        "fragments of A are exchanged",
        Fault("mma.cuh", "asm volatile(", r"(mma\S+ \{[^}]*\}, \{)(\S+), (\S+), (\S+), (\S+)\}", r"\1\2, \4, \3, \5}"),
    ),
    (
        "tensor",
        "fragments of B are exchanged",
        Fault("mma.cuh", "asm volatile(", r"(mma\S+ \{[^}]*\}, \{[^}]*\}, \{)(\S+), (\S+)\}", r"\1\3, \2}"),
    ),
    (
        "tensor",
        "matrices are exchanged as they are loaded",
        Fault("mma.cuh", "ldmatrix.sync", r"\{(\S+), (\S+), (\S+), (\S+)\}", r"{\1, \3, \2, \4}"),
    ),
    (
        "tensor",
        "wgmma replaces its results",
        Fault("wgmma.cuh", "asm volatile(", r"setp\.eq\.u32 p, 0, 0", "setp.ne.u32 p, 0, 0"),
    ),
    ("tensor", "consumers ask for more registers", Fault("megakernel.cu", "setmaxnreg.inc", r"224", "232")),
    ("tensor", "service warps keep more registers", Fault("megakernel.cu", "setmaxnreg.dec", r"56", "64")),
)


# Faults that make no difference in the step that tries them. Why is not known yet.
NOT_FOUND = {
    "lane 1 skips a shuffle",
    "consumers do not fence their stores",
    "attention does not fence its stores",
    "no syncwarp after waits for counters",
    "no syncwarp after waits for stores",
}


def of_kind(kind: str) -> tuple[Fault, ...]:
    return tuple(fault for other, _, fault in FAULTS if other == kind)


def try_all(kind: str, chosen: set[str] | None = None) -> Iterator[tuple[str, str]]:
    """Yield the name of each fault of a kind of build, and what found it; empty if nothing did."""
    names = [name for other, name, _ in FAULTS if other == kind]
    emulator = Emulator(faults=of_kind(kind))
    emulator.schedule.limit_s = 20
    for number, name in enumerate(names, 1):
        if chosen is not None and name not in chosen:
            continue
        yield name, next((found for copies in (2, 0, 1) if (found := _tried(kind, emulator, number, copies))), "")


def _tried(kind: str, emulator: Emulator, number: int, copies: int) -> str:
    emulator.schedule.planted, emulator.schedule.copies = 0, copies
    step = ptx_steps.random_step(kind, 7 if kind == "dots" else 5, tp=1)
    emulator.schedule.planted = number
    emulator.wrong.clear()
    try:
        difference = step.difference()
    except MegakernelError as e:
        difference = str(e)
    found = "\n".join([*emulator.wrong, difference or ""]).strip()
    if not emulator.wrong:
        step.gpu.close()
    return found
