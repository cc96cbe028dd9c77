// The threads of one call: the caller and, as they become free, workers of XLA's pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace pwjax {

// Of this machine.
inline int64_t processors() {
  static const int64_t count = std::max<int64_t>(1, std::thread::hardware_concurrency());
  return count;
}

// Phases in order, each a number of independent items. Whoever comes takes the next item; nobody starts a phase before
// every item of the one before is done. A worker that comes late finds nothing left and touches nothing of the call.
class Team {
 public:
  using Item = std::function<void(int64_t)>;

  void phase(int64_t items, Item run) { phases_.emplace_back(items, std::move(run)); }

  // `schedule(task)` hands a task to another thread; it is called `helpers` times.
  template <typename Schedule>
  static void run(std::shared_ptr<Team> team, int64_t helpers, Schedule&& schedule) {
    int64_t most = 1;
    for (const Phase& phase : team->phases_) most = phase.items > most ? phase.items : most;
    if (helpers > most - 1) helpers = most - 1;
    for (int64_t i = 0; i < helpers; ++i) schedule([team] { team->work(); });
    team->work();
  }

 private:
  struct Phase {
    Phase(int64_t count, Item what) : items(count), run(std::move(what)) {}
    Phase(Phase&& other) : items(other.items), run(std::move(other.run)) {}
    int64_t items;
    Item run;
    std::atomic<int64_t> next{0}, done{0};
  };

  void work() {
    for (Phase& phase : phases_) {
      for (int64_t item; (item = phase.next.fetch_add(1, std::memory_order_relaxed)) < phase.items;) {
        phase.run(item);
        phase.done.fetch_add(1, std::memory_order_release);
      }
      for (int spins = 0; phase.done.load(std::memory_order_acquire) < phase.items; ++spins) {
        if (spins > 1000) std::this_thread::yield();
      }
    }
  }

  std::vector<Phase> phases_;
};

}  // namespace pwjax
