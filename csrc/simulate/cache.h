// What a rank's last shared cache holds: whole pieces (a weight tile, a row block of an activation), the
// least recently used of which leave first.
#pragma once
#include <stdint.h>

#include <vector>

namespace mk::simulate {

class Cache {
 public:
  // `sizes`: bytes of each piece; pieces below `layered` are others in each layer.
  Cache(double capacity, const double* sizes, int32_t pieces, int32_t layered);

  // Bytes of a read that are not there. They are afterwards.
  double read(int32_t piece, int32_t layer, double bytes);
  // Puts more of a piece there, to be written back when it leaves.
  void write(int32_t piece, double bytes);
  // Bytes to write back since the last call.
  double take_written_back();

 private:
  struct Entry {
    double bytes = 0.0;
    int32_t layer = -1;
    int32_t newer = -1, older = -1;
    bool dirty = false;
  };
  void unlink(int32_t piece);
  void touch(int32_t piece);
  void grow(int32_t piece, double to);

  const double capacity_;
  const double* const sizes_;
  const int32_t layered_;
  std::vector<Entry> entries_;
  double held_ = 0.0, written_back_ = 0.0;
  int32_t newest_ = -1, oldest_ = -1;
};

}  // namespace mk::simulate
