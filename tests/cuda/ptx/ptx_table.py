"""What each PTX instruction means in C++: one table, which is also the list of all that the translator understands.

A line without indentation is the common part of the anchors of a section of the PTX ISA, as in
https://docs.nvidia.com/cuda/parallel-thread-execution/#integer-arithmetic-instructions-add. The other lines are entries
with three columns, which at least two spaces separate:

1. The instruction with all its modifiers. Braces list alternatives, `{name:this|that}`, and give them a name.
2. The operands, the destination before the `=`. An operand is a PTX type, the name of an alternative that is a type, or
   a kind: `shared` and `global` are addresses, `box` a place in a tensor map, `label` a place in the code, and `*` one
   that the function of column 3 reads itself. No operands: `-`.
3. The C++ expression for the destination, or a statement if there is none. `{0}` is the first operand after the
   destination, `{t}` the C++ text for the alternative `t`. A name alone, such as `load`, is a function of ptx_code.py.
"""

import re
from dataclasses import dataclass

_TABLE = r"""
integer-arithmetic-instructions
  add.{t:s32|s64}                    t = t t        add({0}, {1})
  sub.{t:s32|s64}                    t = t t        sub({0}, {1})
  mul.lo.{t:s32|s64}                 t = t t        mul({0}, {1})
  mul.hi.{t:s32}                     t = t t        high({0}, {1})
  mul.wide.{t:s32}                   s64 = t t      int64_t{{{0}}} * {1}
  mul.wide.{t:u32}                   u64 = t t      uint64_t{{{0}}} * {1}
  mul.wide.{t:u16}                   u32 = t t      uint32_t{{{0}}} * {1}
  mad.lo.{t:s32}                     t = t t t      add(mul({0}, {1}), {2})
  div.{t:s32|u32|u64}                t = t t        quotient({0}, {1})
  rem.{t:s32|u32}                    t = t t        remainder_of({0}, {1})
  neg.{t:s32}                        t = t          sub({t}{{0}}, {0})
  min.{t:s32|u32|u64}                t = t t        {0} < {1} ? {0} : {1}
  max.{t:s32|u32|u64}                t = t t        {0} > {1} ? {0} : {1}
  popc.b32                           u32 = b32      std::popcount({0})
  bfi.{t:b32|b64}                    t = t t u32 u32  insert({0}, {1}, {2}, {3})
floating-point-instructions
  add.{t:f32}                        t = t t        {0} + {1}
  sub.{t:f32|f64}                    t = t t        {0} - {1}
  mul.{t:f32|f64}                    t = t t        {0} * {1}
  fma.rn.{t:f32|f64}                 t = t t t      std::fma({0}, {1}, {2})
  fma.rm.{t:f32}                     t = t t t      fma_down({0}, {1}, {2})
  div.{how:rn|approx}.{t:f32}        t = t t        {0} / {1}
  neg.{t:f32|f64}                    t = t          -{0}
  max.{t:f32}                        t = t t        std::fmax({0}, {1})
  rcp.rn.{t:f32}                     t = t          1.0f / {0}
  sqrt.rn.{t:f32}                    t = t          std::sqrt({0})
  rsqrt.approx.{t:f32}               t = t          1.0f / std::sqrt({0})
  ex2.approx.{t:f32}                 t = t          std::exp2({0})
  ex2.approx.ftz.{t:f32}             t = t          flushed(std::exp2(flushed({0})))
  tanh.approx.{t:f32}                t = t          std::tanh({0})
comparison-and-selection-instructions
  setp.{c:eq|ne|lt|le|gt|ge}.{t:b32|b64|s16|s32|s64|u32|u64|f64}  pred = t t  {0} {c} {1}
  setp.{c:eq|neu|lt|gt}.{t:f32}      pred = t t     {0} {c} {1}
  setp.equ.{t:f32}                   pred = t t     !({0} < {1} || {0} > {1})
  setp.{c:ltu|leu|gtu|geu}.{t:f32}   pred = t t     !({0} {c} {1})
  setp.nan.{t:f32}                   pred = t t     {0} != {0} || {1} != {1}
  setp.num.{t:f32}                   pred = t t     {0} == {0} && {1} == {1}
  selp.{t:b16|b32|b64|u16|u32|s32|u64|f32|f64}  t = t t pred  {2} ? {0} : {1}
logic-and-shift-instructions
  and.{t:b16|b32|b64|pred}           t = t t        {0} & {1}
  or.{t:b16|b32|b64|pred}            t = t t        {0} | {1}
  xor.{t:b16|b32|b64|pred}           t = t t        {0} ^ {1}
  not.{t:b32|b64}                    t = t          ~{0}
  not.{t:pred}                       t = t          !{0}
  shl.{t:b32|b64}                    t = t u32      left({0}, {1})
  shr.{t:s32|s64|u32|u64}            t = t u32      right({0}, {1})
data-movement-and-conversion-instructions
  mov.{t:b32|b64|u16|u32|u64|f32|f64|pred}  t = t   {0}
  cvt.{d:u16|u32|u64|s64}.{t:u16|u32|u64|s32}  d = t  static_cast<{d}>({0})
  cvt.rn.{d:f32|f64}.{t:s32|u64|f64}  d = t         static_cast<{d}>({0})
  cvt.{d:f64}.{t:f32}                d = t          double{{{0}}}
  cvt.rzi.{d:s32|u64}.{t:f32|f64}    d = t          truncated<{d}>({0})
  cvt.rpi.{d:f64}.{t:f64}            d = t          std::ceil({0})
  cvt.sat.{d:f32}.{t:f32}            d = t          saturated({0})
  cvt.rn.bf16.f32                    b16 = f32      bf16({0})
  cvt.rn.bf16x2.f32                  b32 = f32 f32  uint32_t{{bf16({0})}} << 16 | bf16({1})
  cvta.to.global.u64                 u64 = u64      {0}
  cvta.shared.u64                    u64 = u64      T.generic(static_cast<uint32_t>({0}))
  ld.param{v:|.v2|.v4}.{t:s32|u32|u64}  * *         parameter
  ld{o:|.volatile|.relaxed.gpu|.relaxed.sys|.acquire.gpu|.acquire.sys}{space:|.global|.shared}{cache:|.cg}{v:|.v2|.v4}.{t:u8|u16|u32|s32|u64|f32}  * *  load
  st{o:|.relaxed.gpu|.relaxed.sys}{space:|.global|.shared}{v:|.v2|.v4}.{t:u8|u16|u32|u64|f32}  * *  store
  prefetch.global.L2                 global         (void){0}
  shfl.sync.{mode:idx|bfly}.b32      * b32 b32 b32 b32  shuffle
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes  shared global u32 shared  T.load_bytes({0}, {1}, {2}, {3})
  cp.async.bulk.tensor.{n:3d}.shared::cluster.global.tile.mbarrier::complete_tx::bytes  shared box shared  T.load_box({0}, {1}, {2})
  cp.async.bulk.tensor.{n:5d}.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint  shared box shared u64  T.load_box({0}, {1}, {2})
  cp.async.bulk.tensor.{n:3d}.global.shared::cta.tile.bulk_group  box shared  T.store_box({0}, {1}, false)
  cp.reduce.async.bulk.tensor.{n:3d}.global.shared::cta.add.tile.bulk_group  box shared  T.store_box({0}, {1}, true)
  cp.async.bulk.prefetch.tensor.{n:5d}.L2.global.tile.L2::cache_hint  box u64  T.prefetch_box({0})
  createpolicy.fractional.L2::evict_first.b64  u64 =  0
  cp.async.bulk.commit_group         -              T.commit_bulk()
  cp.async.bulk.wait_group           u32            T.wait_bulk({0}, false)
  cp.async.bulk.wait_group.read      u32            T.wait_bulk({0}, true)
control-flow-instructions
  bra{how:|.uni}                     label          goto {0}
  ret                                -              return
parallel-synchronization-and-communication-instructions
  bar.sync                           u32            T.barrier({0}, 0)
  bar.sync                           u32 u32        T.barrier({0}, {1})
  bar.warp.sync                      b32            T.sync_warp({0})
  vote.sync.all.pred                 pred = pred b32  T.ballot({0}, {1}) == ~0u
  vote.sync.ballot.b32               b32 = pred b32  T.ballot({0}, {1})
  atom{o:|.acq_rel.gpu}{space:|.global|.shared}.{op:add|exch}.{t:u32|s32|b32}  * * *  atomic
  atom{o:}{space:|.global|.shared}.{op:cas}.{t:b32}  * * * *  atomic
  red{o:|.relaxed.gpu|.relaxed.sys|.release.gpu|.release.sys}{space:.global}.{op:add}.{t:s32|f32}  * *  reduce
  fence.mbarrier_init.release.cluster  -            T.fence_barriers()
  fence.proxy.async.global           -              T.fence_global()
  fence.proxy.async.shared::cta      -              T.fence_shared()
  fence.proxy.tensormap::generic.acquire.sys  global u32  T.acquire_map({0}, {1})
  mbarrier.init.shared::cta.b64      shared u32     T.init({0}, {1})
  mbarrier.arrive.{o:release|relaxed}.cta.shared::cta.b64  * shared  T.arrive({0}, 1, 0, {o})
  mbarrier.arrive.{o:release|relaxed}.cta.shared::cta.b64  * shared u32  T.arrive({0}, {1}, 0, {o})
  mbarrier.arrive.expect_tx.{o:release}.cta.shared::cta.b64  * shared u32  T.arrive({0}, 1, {1}, {o})
  mbarrier.test_wait.parity.{o:acquire|relaxed}.cta.shared::cta.b64  pred = shared u32  T.wait({0}, {1}, {o})
  mbarrier.try_wait.parity.{o:acquire|relaxed}.cta.shared::cta.b64  pred = shared u32 u32  T.wait({0}, {1}, {o})
warp-level-matrix-instructions
  mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32  * * * *  mma
  ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16  * *  ldmatrix
asynchronous-warpgroup-level-matrix-instructions
  wgmma.fence.sync.aligned           -              T.wgmma_fence()
  wgmma.mma_async.sync.aligned.m64n{n:128|256}k16.f32.bf16.bf16  * b64 b64 pred * * * *  wgmma
  wgmma.commit_group.sync.aligned    -              T.wgmma_commit()
  wgmma.wait_group.sync.aligned      u32            T.wgmma_wait({0}, results)
miscellaneous-instructions
  setmaxnreg.{way:inc|dec}.sync.aligned.u32  u32    (void){0}
"""  # noqa: E501

CPP = {"pred": "bool", "f32": "float", "f64": "double"} | {
    f"{kind}{bits}": f"{'' if kind == 's' else 'u'}int{bits}_t" for kind in "bus" for bits in (8, 16, 32, 64)
}
# The C++ text for alternatives that are not types: comparisons, memory orders and arguments. If a comparison
# such as ltu is true for NaN, its text is the opposite comparison, which the table negates.
_TEXTS = {
    **{"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="},
    **{"neu": "!=", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"},
    **{"": "kWeak", ".volatile": "Order{kSystem}", ".relaxed.gpu": "Order{kGpu}", ".relaxed.sys": "Order{kSystem}"},
    **{".acquire.gpu": "Order{kGpu, kAcquire}", ".acquire.sys": "Order{kSystem, kAcquire}"},
    **{".release.gpu": "Order{kGpu, kRelease}", ".release.sys": "Order{kSystem, kRelease}"},
    ".acq_rel.gpu": "Order{kGpu, kAcquire | kRelease}",
    **{"acquire": "true", "release": "true", "relaxed": "false"},
}
TEXTS = CPP | _TEXTS


@dataclass(frozen=True)
class Meaning:
    """An entry of the table. `section` is the anchor in the PTX ISA; `result` is the destination's type."""

    section: str
    pattern: re.Pattern[str]
    result: str | None
    operands: tuple[str, ...]
    code: str


def _meanings() -> list[Meaning]:
    out, section = [], ""
    for line in _TABLE.strip().splitlines():
        if not line.startswith(" "):
            section = line
            continue
        name, kinds, code = re.split(r" {2,}", line.strip())
        alternatives = iter(re.findall(r"\{(\w+):([^}]*)\}", name))
        parts = [re.escape(part) for part in re.split(r"\{[^}]*\}", name)]
        regex = parts[0]
        for (label, choice), rest in zip(alternatives, parts[1:], strict=True):
            regex += f"(?P<{label}>{'|'.join(map(re.escape, choice.split('|')))}){rest}"
        result, _, operands = kinds.strip("-").rpartition("=")
        anchor = f"{section}-{re.split(r'[.{]', name)[0]}"
        out.append(Meaning(anchor, re.compile(regex), result.strip() or None, tuple(operands.split()), code))
    return out


MEANINGS = _meanings()


def meaning(opcode: str, operands: int) -> tuple[Meaning, dict[str, str]]:
    """Return the entry for an opcode with modifiers and a number of operands, and the alternatives that it chooses."""
    for entry in MEANINGS:
        match = entry.pattern.fullmatch(opcode)
        if match and operands == len(entry.operands) + (entry.result is not None):
            return entry, match.groupdict()
    raise ValueError(f"{opcode} with {operands} operands is not in the table of PTX instructions")
