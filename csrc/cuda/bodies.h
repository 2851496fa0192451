// The work of each instruction, by opcode.
#pragma once
#include "matmul.h"
#include "ops/attention.h"
#include "ops/embed.h"
#include "ops/norm.h"
#include "ops/reduce.h"
#include "ops/rope.h"
#include "ops/sample.h"
#include "pages.h"

namespace mk {

struct Bodies {
  template <class P>
  MK_FN static void run(P& p, const Call& c, const Task& task, Pages<P>& pages) {
    const int32_t* record = task.record;
    const Opcode opcode = static_cast<Opcode>(record_opcode(record));
    switch (opcode) {
      case Opcode::embed:
        return embed(p, c, operands<Embed>(record));
      case Opcode::rope:
        return rope(p, c, operands<Rope>(record));
      case Opcode::first_norm:
      case Opcode::attn_norm:
      case Opcode::next_norm:
      case Opcode::mlp_norm:
      case Opcode::final_norm:
        return norm(p, c, opcode, shared_operands<FinalNorm, FirstNorm, AttnNorm, NextNorm, MlpNorm>(record));
      case Opcode::o_reduce:
      case Opcode::down_reduce:
        return reduce(p, c, opcode, shared_operands<OReduce, DownReduce>(record));
      case Opcode::sample:
        return sample(p, c, operands<Sample>(record));
      case Opcode::attention:
        return attention(p, c, operands<Attention>(record), pages);
      case Opcode::qkv_rope:
      case Opcode::o_proj:
      case Opcode::o_partial:
      case Opcode::gate_up_silu:
      case Opcode::down_proj:
      case Opcode::down_partial:
      case Opcode::lm_head:
        return matmul(p, c, record, pages);
      case Opcode::join:
      case Opcode::drain:
        return;
    }
  }
};

}  // namespace mk
