// Exports the functions of csrc/cuda/tensor_core.h with C linkage, so that a Python test can call them.
#include "../../csrc/cuda/tensor_core.h"

extern "C" {
uint32_t tile_offset(int row, int byte) { return mk::tile_offset(row, byte); }
uint64_t k_major_descriptor(uint32_t address) { return mk::k_major_descriptor(address); }
uint64_t descriptor_step() { return mk::kDescriptorStep; }
int fragment_row(int lane, int half) { return mk::fragment_row(lane, half); }
int fragment_col(int lane) { return mk::fragment_col(lane); }
int a_row(int lane, int word) { return mk::a_row(lane, word); }
int a_k(int lane, int word) { return mk::a_k(lane, word); }
int b_k(int lane, int word) { return mk::b_k(lane, word); }
int b_col(int lane) { return mk::b_col(lane); }
}
