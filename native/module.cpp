// The Python module: tensors in by DLPack's C exchange (a few nanoseconds each), no torch headers.
#include "dispatch.h"
#include <algorithm>
#include <initializer_list>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;

namespace {

// The part of DLPack's DLPackExchangeAPI (version 1.3) that is used; torch.Tensor publishes it as a capsule.
struct Exchange {
  struct { uint32_t major, minor; } version;
  void *previous;
  void *allocate, *from_object, *to_object;
  int (*borrow)(void *object, nb::dlpack::dltensor *out);
};
const Exchange *exchange = nullptr;

struct Array : nb::dlpack::dltensor {
  explicit Array(nb::handle tensor) {
    if (!exchange) throw std::runtime_error("use_exchange comes first");
    if (exchange->borrow(tensor.ptr(), this)) throw nb::python_error();
  }
  void *start() const { return (char *)data + byte_offset; }
  int64_t step(int i) const { return shape[i] == 1 ? 0 : strides[i]; }
  Dtype kind() const {
    if (dtype.code == (uint8_t)nb::dlpack::dtype_code::Bfloat) return Dtype::bf16;
    return dtype.bits == 16 ? Dtype::f16 : Dtype::f32;
  }
};

// What autograd gives back may no longer be what a call kept: `Tensor.data` and hooks change it, memory with it.
void expect(bool fits) {
  if (!fits) throw std::runtime_error("tensors that do not fit each other: was one that the gradient needs given other memory?");
}

void expect(const Array &a, const Array &like, std::initializer_list<int64_t> shape) {
  expect(a.ndim == (int)shape.size() && std::equal(shape.begin(), shape.end(), a.shape));
  expect(a.dtype.bits == like.dtype.bits && a.dtype.code == like.dtype.code);
}

// Whether each row's features lie side by side.
bool readable(const Array &a) {
  if (!a.shape[0] || !a.shape[1] || !a.shape[2]) return true; // nothing is read
  return a.shape[3] <= 1 || a.strides[3] == 1;
}

// Whether numbers follow one another in the order of the axes.
bool dense(const Array &a) {
  int64_t next = 1;
  bool found = true;
  for (int i = a.ndim - 1; i >= 0; next *= a.shape[i--]) found = found && (a.shape[i] == 1 || a.strides[i] == next);
  return found || !next; // without numbers nothing is read
}

View view(const Array &a) { return {a.start(), a.step(0), a.step(1), a.step(2)}; }

Grid grid(nb::handle tensor, const Problem &p) { // (B|1, H|1, L|1, S|1)
  if (tensor.is_none()) return {};
  Array a(tensor);
  const int64_t sizes[] = {p.B, p.H, p.L, p.S};
  expect(a.ndim == 4);
  for (int i = 0; i < 4; i++) expect(a.shape[i] == 1 || a.shape[i] == sizes[i]);
  return {a.start(), a.step(0), a.step(1), a.step(2), a.step(3)};
}

Grid per_query(nb::handle tensor, const Problem &p) { // (B|1, L|1)
  if (tensor.is_none()) return {};
  Array a(tensor);
  expect(a.ndim == 2 && (a.shape[0] == 1 || a.shape[0] == p.B) && (a.shape[1] == 1 || a.shape[1] == p.L));
  return {a.start(), a.step(0), 0, a.step(1), 0};
}

template <class T = float> T *pointer(nb::handle tensor) { return tensor.is_none() ? nullptr : (T *)Array(tensor).start(); }

struct Unreadable {};

Problem problem(nb::handle query, nb::handle key, nb::handle value, nb::handle context, nb::handle lse, int64_t left,
                int64_t right, nb::handle first, nb::handle behind, nb::handle visible, nb::handle bias, double scale,
                double softcap, nb::handle sinks, nb::handle dropout, int64_t threads, bool trust) {
  static int32_t asked;
  Problem p{};
  Array q(query), k(key), v(value);
  expect(q.ndim == 4 && k.ndim == 4 && v.ndim == 4 && q.dtype.bits <= 32);
  p.dtype = q.kind();
  p.B = q.shape[0], p.H = q.shape[1], p.L = q.shape[2], p.E = q.shape[3];
  p.Hkv = k.shape[1], p.S = k.shape[2], p.Ev = v.shape[3];
  p.query = view(q), p.key = view(k), p.value = view(v);
  expect(p.Hkv && p.H % p.Hkv == 0);
  expect(k, q, {p.B, p.Hkv, p.S, p.E});
  expect(v, q, {p.B, p.Hkv, p.S, p.Ev});
  if (!readable(q) || !readable(k) || !readable(v)) throw Unreadable{};
  if (!context.is_none()) {
    Array c(context);
    expect(c, q, {p.B, p.H, p.L, p.Ev});
    p.context = view(c);
  }
  p.scale = (float)scale;
  p.softcap = (float)softcap;
  if (!sinks.is_none()) {
    Array a(sinks);
    expect(a.ndim == 1 && a.shape[0] == p.H && a.dtype.bits == 32 && dense(a));
    p.sinks = (const float *)a.start();
  }
  p.mask.left = left, p.mask.right = right;
  p.mask.first = per_query(first, p), p.mask.behind = per_query(behind, p);
  p.mask.visible = grid(visible, p), p.mask.bias = grid(bias, p);
  if (!bias.is_none()) p.mask.bias_dtype = Array(bias).kind();
  if (!dropout.is_none()) {
    nb::tuple d = nb::cast<nb::tuple>(dropout);
    p.dropout = {true, nb::cast<int32_t>(d[0]), (uint32_t)nb::cast<int64_t>(d[1]), (uint32_t)nb::cast<int64_t>(d[2]), nb::cast<float>(d[3]),
                 nb::cast<int64_t>(d[4]), nb::cast<int64_t>(d[5]), nb::cast<int64_t>(d[6])};
  }
  if (!lse.is_none()) {
    Array a(lse);
    const int64_t shape[] = {p.B, p.H, p.L, 2};
    expect(a.dtype.bits == 32 && a.ndim == 4 && std::equal(shape, shape + 4, a.shape));
    p.seen.lse = (float *)a.start();
  }
  p.threads = threads;
  p.non_finite = trust ? nullptr : &asked; // the driver puts its own in
  return p;
}

// statistics: None, or (entropy, max_weight, distance, received, top_weights, top_keys, [group ...], mass,
// [offset ...], at_offsets, rest, max_score), tensors or None.
void read_statistics(Problem &p, nb::handle statistics) {
  if (statistics.is_none()) return;
  nb::tuple s = nb::cast<nb::tuple>(statistics);
  Statistics &seen = p.seen;
  seen.entropy = pointer(s[0]), seen.max_weight = pointer(s[1]), seen.distance = pointer(s[2]), seen.received = pointer(s[3]);
  seen.top_weights = pointer(s[4]), seen.top_keys = pointer<int32_t>(s[5]);
  if (!s[4].is_none()) seen.top = Array(s[4]).shape[3];
  nb::list groups = nb::cast<nb::list>(s[6]), offsets = nb::cast<nb::list>(s[8]);
  if (groups.size() > MAX_GROUPS || offsets.size() > MAX_OFFSETS) throw nb::value_error("too many groups or offsets");
  for (nb::handle group : groups) { // (B|1, S)
    Array a(group);
    seen.group[seen.groups++] = {a.start(), a.step(0), 0, 0, a.step(1)};
  }
  seen.mass = pointer(s[7]);
  for (nb::handle offset : offsets) seen.offset[seen.offsets++] = nb::cast<int64_t>(offset);
  seen.at_offsets = pointer(s[9]), seen.rest = pointer(s[10]), seen.max_score = pointer(s[11]);
}

// What a call comes to: done; a NaN or an infinity that a query could see, and results that mean nothing; or nothing
// done, as the memory of query, key, value or the context's gradient isn't laid out as the kernels read it.
enum Outcome { DONE, NON_FINITE, UNREADABLE };

int forward(nb::handle query, nb::handle key, nb::handle value, nb::handle context, nb::handle lse, int64_t left,
             int64_t right, nb::handle first, nb::handle behind, nb::handle visible, nb::handle bias, double scale,
             double softcap, nb::handle sinks, nb::handle dropout, int64_t threads, bool trust, nb::handle statistics) {
  try {
    Problem p = problem(query, key, value, context, lse, left, right, first, behind, visible, bias, scale, softcap, sinks, dropout, threads, trust);
    read_statistics(p, statistics);
    nb::gil_scoped_release release;
    return attend(p) ? DONE : NON_FINITE;
  } catch (Unreadable) {
    return UNREADABLE;
  }
}

int backward(nb::handle query, nb::handle key, nb::handle value, nb::handle context, nb::handle lse, int64_t left,
              int64_t right, nb::handle first, nb::handle behind, nb::handle visible, nb::handle bias, double scale,
              double softcap, nb::handle sinks, nb::handle dropout, int64_t threads, bool trust, nb::handle dcontext, nb::handle dquery, nb::handle dkey,
              nb::handle dvalue, nb::handle dbias) {
  try {
    Problem p = problem(query, key, value, context, lse, left, right, first, behind, visible, bias, scale, softcap, sinks, dropout, threads, trust);
    Array of_context(dcontext);
    // Context and lse were kept by autograd, whose hooks may have laid them out anew.
    expect(of_context, Array(query), {p.B, p.H, p.L, p.Ev});
    if (!readable(of_context) || !readable(Array(context)) || !dense(Array(lse))) return UNREADABLE;
    p.gradient = {view(of_context), view(Array(dquery)), view(Array(dkey)), view(Array(dvalue)), grid(dbias, p)};
    nb::gil_scoped_release release;
    return attend_backward(p) ? DONE : NON_FINITE;
  } catch (Unreadable) {
    return UNREADABLE;
  }
}

} // namespace

NB_MODULE(_native, m) {
  m.doc() = "Attention kernels for the CPU.";
  m.def("use_exchange", [](nb::capsule api) {
    auto *table = (const Exchange *)PyCapsule_GetPointer(api.ptr(), "dlpack_exchange_api");
    if (!table) throw nb::python_error();
    if (table->version.major != 1) throw nb::value_error("clearhead knows version 1 of DLPack's exchange");
    exchange = table;
  });
  m.def("isa", [] { return std::string(isa()); });
  m.def("isas", isas);
  m.def("set_isa", [](const std::string &name) {
    if (set_isa(name)) return;
    std::string known;
    for (const std::string &n : isas()) known += (known.empty() ? "" : ", ") + n;
    throw nb::value_error(("this processor and build have no instruction set '" + name + "': choose from " + known + ".").c_str());
  });
  m.attr("DONE") = (int)DONE, m.attr("NON_FINITE") = (int)NON_FINITE, m.attr("UNREADABLE") = (int)UNREADABLE;
  m.def("openmp", openmp);
  m.def("peak", peak, nb::call_guard<nb::gil_scoped_release>());
  m.def("forward", forward, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(),
        nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg().none());
  m.def("backward", backward, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
        nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(),
        nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
}
