// linear for one instruction set; included after kernel.h, whose 16-bit rows these are.

namespace pwjax {
namespace {

// An item is worth handing to another thread from about so many words of weights on.
constexpr int64_t kLinearWords = 16 * 1024;

struct Multiply {
  const Linear a;
  const int32_t page = 0;  // the matrix is one page, that an arena of its own begins with
  Block block;
  int64_t band;
  std::vector<const Element*> x;

  explicit Multiply(const Linear& call) : a(call) {
    block.bits = 16;
    block.rows = a.rows;
    block.cols = a.cols;
    block.dense = Rows{a.weights, &page, 0, a.cols / 2, a.rows};
    const int64_t enough = ceil_div(kLinearWords, a.cols / 2);
    const int64_t least = ceil_div(enough, kStreamBand) * kStreamBand;
    band = a.tokens > kStreamed ? band_rows(a.cols) : std::max(least, stream_band(a.rows));
    for (int64_t t = 0; t < a.tokens; ++t) x.push_back(of_token(t));
  }

  Element* of_token(int64_t t) const { return reinterpret_cast<Element*>(a.scratch) + t * row_elements(a.cols); }

  void token(int64_t t) { reorder(a.x + t * a.cols, a.cols, true, of_token(t)); }

  void rows_of(int64_t item) {
    const int64_t first = item * band, limit = first + band < a.rows ? first + band : a.rows;
    rows(Rect{block, first, limit, x.data(), a.tokens, a.y + first, a.rows});
  }
};

}  // namespace

// Fills in `team` with the work of a call. The returned object must live until the team is done.
std::shared_ptr<void> PWJAX_NAME(linear)(const Linear& call, Team* team) {
  auto work = std::make_shared<Multiply>(call);
  Multiply* w = work.get();
  team->phase(call.tokens, [w](int64_t t) { w->token(t); });
  team->phase(ceil_div(call.rows, w->band), [w](int64_t item) {
    Isa::Mode mode;
    w->rows_of(item);
  });
  return work;
}

}  // namespace pwjax
