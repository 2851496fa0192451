// Exports functions of csrc/cuda/tensor_core.h with C linkage, so that a Python test can call them.
#include "../../csrc/cuda/tensor_core.h"

extern "C" {
uint32_t tile_offset(int row, int byte) { return mk::tile_offset(row, byte); }
int fragment_row(int lane, int half) { return mk::fragment_row(lane, half); }
int fragment_col(int lane) { return mk::fragment_col(lane); }
}
