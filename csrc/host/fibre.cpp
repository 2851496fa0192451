#include "fibre.h"

#include <sys/mman.h>
#include <unistd.h>

#include <stdexcept>
#include <utility>

namespace mk {
namespace {

constexpr size_t kStackBytes = 128 << 10;  // with a guard page at its lower end

}  // namespace

Scheduler::Scheduler(uint64_t seed, int fibres)
    : state_(seed * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u),
      bias_(static_cast<Bias>(seed % 4)),
      stack_bytes_(kStackBytes),
      stack_count_(fibres) {
  void* memory = mmap(nullptr, stack_bytes_ * stack_count_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("no memory for the stacks of the fibres");
  stacks_ = static_cast<char*>(memory);
}

Scheduler::~Scheduler() { munmap(stacks_, stack_bytes_ * stack_count_); }

uint32_t Scheduler::draw(uint32_t n) {
  state_ ^= state_ << 13;
  state_ ^= state_ >> 7;
  state_ ^= state_ << 17;
  return static_cast<uint32_t>((state_ >> 32) * n >> 32);
}

void Scheduler::add(std::function<void()> body) {
  char* stack = stacks_ + fibres_.size() * stack_bytes_;
  mprotect(stack, static_cast<size_t>(sysconf(_SC_PAGESIZE)), PROT_NONE);
  auto fibre = std::make_unique<Fibre>();
  fibre->body = std::move(body);
  fibre->slow = bias_ == Bias::kSlowFibres && draw(2) == 0;
  getcontext(&fibre->start);
  fibre->start.uc_stack.ss_sp = stack;
  fibre->start.uc_stack.ss_size = stack_bytes_;
  fibre->start.uc_link = nullptr;
  const uint64_t self = reinterpret_cast<uint64_t>(this);
  makecontext(&fibre->start, reinterpret_cast<void (*)()>(enter), 2, static_cast<unsigned>(self >> 32),
              static_cast<unsigned>(self));
  make_ready(fibre.get());
  fibres_.push_back(std::move(fibre));
  ++live_;
}

void Scheduler::enter(unsigned high, unsigned low) {
  auto* self = reinterpret_cast<Scheduler*>(uint64_t{high} << 32 | low);
  self->current_->body();
  self->current_->ended = true;
  self->leave();
}

void Scheduler::leave() {
  if (_setjmp(current_->context) == 0) _longjmp(home_, 1);
}

void Scheduler::resume(Fibre* fibre) {
  current_ = fibre;
  ++switches_;
  if (_setjmp(home_) == 0) {
    if (fibre->begun) _longjmp(fibre->context, 1);
    fibre->begun = true;
    setcontext(&fibre->start);
  }
  if (current_->ended) --live_;
  current_ = nullptr;
}

void Scheduler::pause() {
  if (draw(4) != 0) return;
  make_ready(current_);
  leave();
}

void Scheduler::block(Waiters& waiters) {
  current_->waiting = &waiters;
  current_->next = waiters.first;
  waiters.first = current_;
  leave();
}

void Scheduler::wake(Waiters& waiters) {
  for (Fibre* fibre = std::exchange(waiters.first, nullptr); fibre != nullptr;) {
    Fibre* next = std::exchange(fibre->next, nullptr);
    fibre->waiting = nullptr;
    make_ready(fibre);
    fibre = next;
  }
}

void Scheduler::wake_all() {
  for (const std::unique_ptr<Fibre>& fibre : fibres_) {
    if (fibre->waiting != nullptr) wake(*fibre->waiting);
  }
}

Fibre* Scheduler::take_fibre() {
  std::vector<Fibre*>& list =
      ready_[0].empty() || (!ready_[1].empty() && draw(32) == 0) ? ready_[1] : ready_[0];
  std::swap(list[draw(static_cast<uint32_t>(list.size()))], list.back());
  Fibre* fibre = list.back();
  list.pop_back();
  return fibre;
}

void Scheduler::run_operation() {
  std::swap(operations_[draw(static_cast<uint32_t>(operations_.size()))], operations_.back());
  const std::function<void()> operation = std::move(operations_.back());
  operations_.pop_back();
  operation();
}

bool Scheduler::run(const std::function<bool()>& stuck) {
  while (live_ > 0) {
    const size_t ready = ready_[0].size() + ready_[1].size(), operations = operations_.size();
    if (ready + operations == 0) {
      if (!stuck()) return false;
      continue;
    }
    bool operate = ready == 0;
    if (ready > 0 && operations > 0) {
      switch (bias_) {
        case Bias::kLateOperations:
          operate = draw(64) == 0;
          break;
        case Bias::kEarlyOperations:
          operate = draw(4) != 0;
          break;
        default:
          operate = draw(static_cast<uint32_t>(ready + operations)) < operations;
      }
    }
    operate ? run_operation() : resume(take_fibre());
  }
  while (!operations_.empty()) run_operation();
  return true;
}

}  // namespace mk
