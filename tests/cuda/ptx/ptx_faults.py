"""Faults that tests plant in the interpreter's PTX, to see whether executing it finds them."""

import re
from dataclasses import dataclass

# The faults of each kind of build. A line is an edit, and edits with the same name are one fault. At least two spaces
# separate the columns: the fault's name; the source file and a part of the source line whose instructions change, also
# where that line is inlined; a regular expression for a part of an instruction; the text that replaces this part. If
# there is no such text, the whole instruction is left out.
_TABLE = r"""
dots
  signals release nothing  counters.h: p.signal(params_.counters_of(rank) + told.at, 1, scope_)  red\.release  red.relaxed
  consumers release nothing before the storer signals  consumer.h: p.arrive(slot.outputs)  arrive\.release  arrive.relaxed
  signals between GPUs have the scope of one GPU  counters.h: p.signal(params_.counters_of(rank) + told.at, 1, scope_)  \.sys\.global  .gpu.global
  the last item of a split acquires nothing  attention.h: p_.arrive_acq_rel(  atom\.acq_rel\.gpu  atom
  releases of pages release nothing  pages.h: p_.arrive(block_.empty[  arrive\.release  arrive.relaxed
  no syncwarp before the outputs are complete  consumer.h: p.arrive(slot.outputs)  bar\.warp\.sync
  no syncwarp before a page is released  pages.h: p_.arrive(block_.empty[  bar\.warp\.sync
  lane 1 skips a shuffle  device.cuh: return __shfl_sync(0xFFFFFFFFu, taken, 0)  shfl\.sync\.idx\.b32 (%\w+)\S*, (%\w+),.*  mov.b32 \1, \2
  neither consumers nor loaders fence  consumer.h: p.fence_async()  fence\.proxy\.async
  neither consumers nor loaders fence  loaders.h: p.fence_async()  fence\.proxy\.async
  consumers do not fence their reads of pages  pages.h: ^p_.fence_pages()  fence\.proxy\.async
  loaders do not wait for empty pages  loaders.h: p.wait(block.empty[at.slot]  mbarrier\.try_wait\S+ (\S+),.*  setp.eq.u32 \1, 0, 0
  the storer does not wait for outputs  storer.h: p.wait(slot.outputs  mbarrier\.try_wait\S+ (\S+),.*  setp.eq.u32 \1, 0, 0
  consumers do not wait for inputs  consumer.h: p.wait(slot.inputs  mbarrier\.try_wait\S+ (\S+),.*  setp.eq.u32 \1, 0, 0
  consumers do not meet before they exchange values  call.h: p_.consumer_sync()  bar\.sync
  tiles of normalised heads do not meet before they exchange sums  dots.h: if (kHeadNorms && m.phase.head_norm  bar\.sync
  the barrier of consumers expects another warp  device.cuh: bar.sync 1, %0  bar\.sync 1, 256  bar.sync 1, 288
  blocks do not meet after their set-up  roles.h: p.sync_block()  bar\.sync 0
  a consumer does not release a page  pages.h: p_.arrive(block_.empty[  mbarrier\.arrive
  signals are sent twice  counters.h: p.signal(params_.counters_of(rank) + told.at, 1, scope_)  (red\..*)  \1; \1
  columns come from the next row of the map  loaders.h: p.load_columns(page, map  \{(\S+), (\S+), (\S+), (\S+), (\S+)\}  {\1, \2, \4, \3, \5}
tensor
  an item's signals release nothing  pages.h: signal_item(  red\.release  red.relaxed
  waits for counters acquire nothing  device.cuh: load_acquire(need.value  ld\.acquire  ld.relaxed
  waits for barriers acquire nothing  device.cuh: try_wait(b, parity)  parity\.acquire  parity.relaxed
  arrivals at ready release nothing  pages.h: p_.arrive(block_.stages[stage_of(stage_++).slot].ready  arrive\.release  arrive.relaxed
  the controller's arrivals release nothing  controller.h: p_.arrive(slot.fetched)  arrive\.release  arrive.relaxed
  no syncwarp before an output page is ready  pages.h: p_.arrive(block_.stages[stage_of(stage_++).slot].ready  bar\.warp\.sync
  no syncwarp before a task is handed over  controller.h: p_.arrive(slot.fetched)  bar\.warp\.sync
  no syncwarp after waits for an item's counters  loaders.h: wait_item(p, params, block.dims  bar\.warp\.sync
  no syncwarp after waits for stores  storer.h: if (stored) p.wait_stores()  bar\.warp\.sync
  neither consumers nor loaders of attention fence  attention.h: p_.fence_async()  fence\.proxy\.async
  neither consumers nor loaders of attention fence  loaders.h: p.fence_async()  fence\.proxy\.async
  neither consumers nor loaders of attention fence  consumer.h: p.fence_async()  fence\.proxy\.async
  consumers do not fence output pages  pages.h: ^p_.fence_pages()  fence\.proxy\.async
  tensor maps are not acquired  roles.h: p.acquire_map(params.maps[i])  fence\.proxy\.tensormap
  no fence after the initialisation of barriers  roles.h: p.sync_block()  fence\.mbarrier_init
  consumers do not wait for pages  pages.h: p_.wait(block_.full[page.slot]  mbarrier\.try_wait\S+ (\S+),.*  setp.eq.u32 \1, 0, 0
  the storer does not wait for output pages  storer.h: p.wait(block.stages[at].ready  mbarrier\.try_wait\S+ (\S+),.*  setp.eq.u32 \1, 0, 0
  the parity of pages is always 0  block.h: n / kRing & 1  and\.b32 (\S+), (\S+), 1$  and.b32 \1, \2, 0
  the parity of stages is always 0  block.h: n / kStages & 1  and\.b32 (\S+), (\S+), 1$  and.b32 \1, \2, 0
  consumers do not wait for stages  pages.h: p_.test(full[0]  mbarrier\.test_wait\S+ (\S+),.*  setp.eq.u32 \1, 0, 0
  loaders do not wait for empty stages  loaders.h: p.wait(stage.empty  mbarrier\.try_wait\S+ (\S+),.*  setp.eq.u32 \1, 0, 0
  loaders do not wait between pages and stages  loaders.h: p.wait(block.slots[slot_of(j - 1)].retired  mbarrier\.try_wait\S+ (\S+),.*  setp.eq.u32 \1, 0, 0
  a stage needs one arrival less  roles.h: p.init(stage.empty, kConsumerWarps)  (mbarrier\.init\S* \S+), \S+$  \1, 7
  a consumer does not release a stage  pages.h: p_.arrive(block_.stages[stage_of(stage_ - n).slot].empty  mbarrier\.arrive
  stores are not waited for  device.cuh: cp.async.bulk.wait_group 0  cp\.async\.bulk\.wait_group 0
  a page is released while it is stored  device.cuh: cp.async.bulk.wait_group.read 0  cp\.async\.bulk\.wait_group\.read 0
  stores are not committed  device.cuh: cp.async.bulk.commit_group  cp\.async\.bulk\.commit_group
  results are read before wgmma has ended  wgmma.cuh: wgmma.wait_group  aligned 0  aligned 1
  pages are released while wgmma reads them  wgmma.cuh: wgmma.wait_group  aligned 1  aligned 2
  no wgmma.fence  wgmma.cuh: wgmma.fence  wgmma\.fence
  a stage expects no bytes  loaders.h: p.expect(stage.full[inputs], loads ? bytes : 0)  expect_tx\.release(.*), \S+$  release\1, 1
  a page is empty before the other loader has passed it  roles.h: p.init(block.empty[i], kConsumerWarps + 1)  (mbarrier\.init\S* \S+), \S+$  \1, 8
  a consumer does not report the end  consumer.h: p.arrive(slot.retired)  mbarrier\.arrive
  signals go to the next counter  counters.h: p.signal(params_.counters_of(rank) + told.at, 1, scope_)  (red\S+ \[%\w+)\]  \1+4]
  the coordinates of tiles are exchanged  loaders.h: load_tiles(p, params, block, first  \{(\S+), (\S+), (\S+)\}  {\2, \1, \3}
  loads go to the page's second half  loaders.h: load_tiles(p, params, block, first  (cp\.async\.bulk\S*complete_tx::bytes\S*) \[(%\w+)\]  \1 [\2+4096]
  pages of weights are not loaded  loaders.h: load_tiles(p, params, block, first  cp\.async
  residuals are stored, not added  storer.h: p.store_tile(map, box.x  cp\.reduce(\S+)\.add(\S+)  cp\1\2
  fragments of A are exchanged  attention_mma.h: asm volatile(  (mma\S+ \{[^}]*\}, \{)(\S+), (\S+), (\S+), (\S+)\}  \1\2, \4, \3, \5}
  fragments of B are exchanged  attention_mma.h: asm volatile(  (mma\S+ \{[^}]*\}, \{[^}]*\}, \{)(\S+), (\S+)\}  \1\3, \2}
  matrices are exchanged as they are loaded  attention_mma.h: ldmatrix.sync  \{(\S+), (\S+), (\S+), (\S+)\}  {\1, \3, \2, \4}
  wgmma replaces its results  wgmma.cuh: asm volatile(  setp\.eq\.u32 p  setp.ne.u32 p
experts dots
  the controller acquires nothing before it reads ROUTES  controller.h: wait_words(p_, params_, block_.dims, slot.task)  ld\.acquire  ld.relaxed
  a row's expert is read from another place of ROUTES  routes.h: return load_int(experts  \[(%\w+)\]  [\1+4]
  results of experts are added with the weights of others  combine.h: load_float(weights + first + j)  \[(%\w+)\]  [\1+4]
experts tensor
  each part of experts signals  routes.h: task.record[i] = 0  st\.
row dots
  signals release nothing  counters.h: p.signal(params_.counters_of(rank) + told.at, 1, scope_)  red\.release  red.relaxed
  loaders do not wait for empty pages  loaders.h: p.wait(block.empty[at.slot]  mbarrier\.try_wait\S+ (\S+),.*  setp.eq.u32 \1, 0, 0
  consumers do not wait for inputs  consumer.h: p.wait(slot.inputs  mbarrier\.try_wait\S+ (\S+),.*  setp.eq.u32 \1, 0, 0
  the parity of pages is always 0  block.h: n / kRing & 1  and\.b32 (\S+), (\S+), 1$  and.b32 \1, \2, 0
  a consumer does not release a page  pages.h: p_.arrive(block_.empty[  mbarrier\.arrive
  warps do not meet when they have copied a row of inputs  dots.h: ^p.consumer_sync()  bar\.sync
  warps that share a tile of attention do not meet  attention_mma.h: ^p.consumer_sync()  bar\.sync
"""  # noqa: E501


@dataclass(frozen=True)
class Fault:
    """One edit of the instructions that a source line generates. The edits of a fault share its `number`."""

    number: int
    name: str
    file: str
    line: str
    pattern: str
    to: str | None

    def edited(self, instruction: str) -> str:
        """Return what replaces `instruction`: `instruction` itself if the fault does not change it."""
        if self.to is not None:
            return re.sub(self.pattern, self.to, instruction)
        return "" if re.search(self.pattern, instruction) else instruction


def _faults() -> dict[str, list[Fault]]:
    out: dict[str, list[Fault]] = {}
    for line in _TABLE.strip().splitlines():
        if not line.startswith(" "):
            own = out.setdefault(line, [])
            continue
        name, place, pattern, *to = re.split(r" {2,}(?=\S)", line.strip())
        file, part = place.split(": ", 1)
        names = list(dict.fromkeys([*(fault.name for fault in own), name]))
        own.append(Fault(names.index(name) + 1, name, file, part, pattern, *(to or [None])))
    return out


FAULTS = _faults()
