// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// _core.Engine: api::Attention for Python.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <vector>

#include "../api/attention.h"
#include "../api/numbered.h"
#include "../cpu/dispatch.h"
#include "../cuda/backend.h"
#include "array.h"
#include "layouts.h"

namespace flashbsr::bind {

namespace {

/// Keeps a Python object; the last who lets go of it may be without the GIL.
std::shared_ptr<void> shared(nb::object object) {
  return {new nb::object(std::move(object)), [](void* kept) {
            const nb::gil_scoped_acquire locked;
            delete static_cast<nb::object*>(kept);
          }};
}

api::Scale scale_of(nb::handle object, const char* name, std::optional<Import>& keep) {
  api::Scale scale;
  if (object.is_none()) return scale;
  double number = 0;
  if (nb::try_cast(object, number, true)) {
    scale.number = static_cast<float>(number);
    return scale;
  }
  keep.emplace(object, name, false, Memory::kAny);
  scale.per_head = &keep->array();
  return scale;
}

const char* copies_name(KvCopies copies) {
  return copies == KvCopies::kEither ? "either" : copies == KvCopies::kRows ? "rows" : "boxes";
}

/// flashbsr.jit's compiler of a variant, for the engine.
class PythonProvider final : public api::KernelProvider {
 public:
  explicit PythonProvider(nb::object provider) : provider_(std::move(provider)) {}
  PythonProvider(const PythonProvider&) = delete;
  PythonProvider& operator=(const PythonProvider&) = delete;
  ~PythonProvider() override {
    const nb::gil_scoped_acquire locked;
    provider_.reset();
  }

  std::string name() override {
    const nb::gil_scoped_acquire locked;
    return nb::cast<std::string>(provider_.attr("name"));
  }

  std::string cpu_library(const std::string& isa) override {
    const nb::gil_scoped_acquire locked;
    return nb::cast<std::string>(provider_.attr("cpu_library")(isa));
  }

  std::string cuda_kernel(const api::KernelWish& wish) override {
    const nb::gil_scoped_acquire locked;
    const nb::bytes code = nb::cast<nb::bytes>(provider_.attr("cuda_kernel")(
        wish.name, wish.family, wish.arch, wish.target, wish.head_dim, wish.head_dim_vo,
        dtype_name(wish.q), dtype_name(wish.kv), wish.rows, wish.variant, copies_name(wish.copies),
        dtype_name(wish.v)));
    return {code.c_str(), code.size()};
  }

 private:
  nb::object provider_;
};

/// Without the GIL while an Attention with a provider is used: its lock is held while kernels are
/// compiled, which takes the GIL.
class Unlocked {
 public:
  explicit Unlocked(const api::Attention& attention) {
    if (attention.has_provider()) released_.emplace();
  }

 private:
  std::optional<nb::gil_scoped_release> released_;
};

/// A method that takes the attention's lock.
template <class Result, class... Args>
auto unlocked(Result (api::Attention::*method)(Args...)) {
  return [method](api::Attention& self, Args... args) {
    const Unlocked unlocked(self);
    return (self.*method)(args...);
  };
}

/// A tuple with a number's four bytes as an int, or an array, for each extra that is declared.
std::vector<api::ExtraValue> extra_values(const nb::tuple& values,
                                          const std::vector<api::ExtraOption>& options,
                                          std::vector<Import>& keep) {
  std::vector<api::ExtraValue> out(options.size());
  keep.reserve(options.size());
  for (size_t i = 0; i < options.size(); ++i) {
    if (options[i].rank == 0) {
      out[i].bits = nb::cast<uint32_t>(values[i]);
    } else {
      keep.emplace_back(values[i], options[i].name.c_str(), false, Memory::kAny);
      out[i].array = &keep.back().array();
    }
  }
  return out;
}

void plan(api::Attention& self, const nb::tuple& layout, nb::handle custom_mask,
          nb::handle packed_custom_mask, nb::handle tree_parents, nb::handle q_positions,
          bool share, uintptr_t stream) {
  cuda::sweep();
  const LayoutImport laid_out(layout);
  const OptionalImport mask(custom_mask, "custom_mask"),
      packed(packed_custom_mask, "packed_custom_mask"), parents(tree_parents, "tree_parents"),
      positions(q_positions, "q_positions");
  const Unlocked unlocked(self);
  self.plan(laid_out.arrays(), {.mask = {mask.copy(), packed.copy(), parents.copy()},
                                .q_positions = positions.copy(),
                                .share = share,
                                .stream = stream_of(stream)});
}

void plan_like(api::Attention& self, api::Attention& like, uintptr_t stream) {
  cuda::sweep();
  const Unlocked unlocked(self.has_provider() ? self : like);
  self.plan(like, stream_of(stream));
}

/// `arrays`: the fields of api::LengthArrays, or None. Python keeps them: they are read again when
/// a run needs another plan.
void update(api::Attention& self, const nb::tuple& arrays, uintptr_t stream, bool check) {
  const auto take = [&](size_t i, const char* name) {
    return OptionalImport(arrays[i], name, false, Memory::kAny).copy();
  };
  const Import lens(arrays[0], "kv_lens", false, Memory::kAny);
  const api::LengthArrays given{.kv_lens = lens.array(),
                                .block_tables = take(1, "block_tables"),
                                .kv_indptr = take(2, "kv_indptr"),
                                .kv_indices = take(3, "kv_indices"),
                                .qo_indptr = take(4, "qo_indptr"),
                                .q_positions = take(5, "q_positions")};
  const Unlocked unlocked(self);
  self.update(given, {.stream = stream_of(stream), .check = check});
}

/// Bits of `how` in Engine.run.
enum RunBits : int { kOverlapPrologue = 1, kOverlapKv = 2, kCheck = 4, kWait = 8 };

void run(api::Attention& self, nb::handle q, nb::handle k, nb::handle v, nb::handle out,
         nb::handle lse, nb::handle q_scale, nb::handle k_scale, nb::handle v_scale,
         nb::handle sinks, nb::handle alibi_slopes, const nb::tuple& extras, uintptr_t stream,
         int how, nb::handle k_scales, nb::handle v_scales, double o_scale, nb::handle out_scales) {
  constexpr Memory kAny = Memory::kAny;
  const Import q_in(q, "q", false, kAny), k_in(k, v.is_none() ? "kv" : "k", false, kAny);
  const OptionalImport v_in(v, "v", false, kAny);
  const Import out_in(out, "out", true, kAny);
  const OptionalImport lse_in(lse, "lse", true, kAny), sinks_in(sinks, "sinks", false, kAny),
      slopes_in(alibi_slopes, "alibi_slopes", false, kAny),
      k_scales_in(k_scales, "k_scale", false, kAny), v_scales_in(v_scales, "v_scale", false, kAny),
      out_scales_in(out_scales, "out", true, kAny);
  std::optional<Import> keep[3];
  std::vector<Import> kept;
  api::RunArrays arrays{.q = q_in.array(),
                        .k = k_in.array(),
                        .v = v_in.get(),
                        .out = out_in.array(),
                        .out_scales = out_scales_in.get(),
                        .lse = lse_in.get(),
                        .q_scale = scale_of(q_scale, "q_scale", keep[0]),
                        .k_scale = scale_of(k_scale, "k_scale", keep[1]),
                        .v_scale = scale_of(v_scale, "v_scale", keep[2]),
                        .o_scale = static_cast<float>(o_scale),
                        .sinks = sinks_in.get(),
                        .alibi_slopes = slopes_in.get(),
                        .extras = extra_values(extras, self.extras(), kept)};
  arrays.k_scale.per_token = k_scales_in.get();
  arrays.v_scale.per_token = v_scales_in.get();
  const api::RunOptions options{.stream = stream_of(stream),
                                .overlap = how & kOverlapKv         ? Overlap::kKv
                                           : how & kOverlapPrologue ? Overlap::kPrologue
                                                                    : Overlap::kNone,
                                .check = (how & kCheck) != 0,
                                .wait = (how & kWait) != 0};
  const nb::gil_scoped_release unlocked;
  self.run(arrays, options);
}

nb::object plan_buffer(api::Attention& self) {
  auto* copy = new std::vector<int32_t>(unlocked(&api::Attention::plan_buffer)(self));
  const nb::capsule owner(copy,
                          [](void* p) noexcept { delete static_cast<std::vector<int32_t>*>(p); });
  return nb::cast(
      nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>(copy->data(), {copy->size()}, owner));
}

nb::dict run_stats(api::Attention& self) {
  nb::dict stats;
  const api::RunStats last = unlocked(&api::Attention::stats)(self);
  if (last.threads == 0) return stats;  // a GPU's runs are not timed
  nb::list busy;
  for (const double s : last.busy_seconds) busy.append(s);
  stats["kernel_s"] = last.kernel_seconds;
  stats["busy_s"] = busy;
  stats["isa"] = cpu::chosen_table().isa;
  stats["threads"] = last.threads;
  return stats;
}

/// Names of the types of q, K, V and out; empty: the plan has not run.
nb::list run_dtypes(api::Attention& self) {
  nb::list names;
  if (const auto types = self.run_types()) {
    for (const DType type : {types->q, types->k, types->v, types->out})
      names.append(dtype_name(type));
  }
  return names;
}

/// The CUDA ordinal; None: the CPU.
nb::object place(api::Attention& self) {
  const api::Place place = unlocked(&api::Attention::place)(self);
  return place.cuda ? nb::object(nb::int_(place.device)) : nb::none();
}

api::AttentionOptions options_from(const nb::dict& d) {
  // An option of the wrong type is a defect of the package: name it.
  const auto take = [&]<class T>(const char* key, T* out) {
    if (!nb::try_cast(nb::object(d[key]), *out)) {
      throw Error(ErrorCode::kDType, key, nb::cast<std::string>(nb::repr(d[key])), "another type");
    }
    return *out;
  };
  const auto integer = [&](const char* key) {
    int32_t v;
    return take(key, &v);
  };
  const auto number = [&](const char* key) {
    double v;
    return take(key, &v);
  };
  const auto boolean = [&](const char* key) {
    bool v;
    return take(key, &v);
  };
  const auto text = [&](const char* key) {
    std::string v;
    return take(key, &v);
  };
  api::AttentionOptions o;
  o.shape = {.num_qo_heads = integer("num_qo_heads"),
             .num_kv_heads = integer("num_kv_heads"),
             .causal = boolean("causal"),
             .window_left = integer("window_left"),
             .context_size = integer("context_size"),
             .context_rank = integer("context_rank"),
             .context_interleave = integer("context_interleave")};
  o.hnd = text("kv_layout") == "HND";
  o.head_dim_qk = integer("head_dim_qk");
  o.head_dim_vo = integer("head_dim_vo");
  o.latent = boolean("latent");
  o.sm_scale = static_cast<float>(number("sm_scale"));
  o.soft_cap = static_cast<float>(number("logits_soft_cap"));
  const std::string position = text("pos_encoding_mode");
  o.position = position == "ROPE_LLAMA" ? Position::kRopeLlama
               : position == "ALIBI"    ? Position::kAlibi
                                        : Position::kNone;
  RopeFrequencies& f = o.rope.frequencies;
  f.theta = number("rope_theta");
  f.scale = number("rope_scale");
  if (const nb::object llama = d["rope_llama31"]; !llama.is_none()) {
    f.llama31 = true;
    std::tie(f.low_freq_factor, f.high_freq_factor, f.old_context_len) =
        nb::cast<std::tuple<double, double, double>>(llama);
  }
  for (const nb::handle given : nb::cast<nb::tuple>(d["rope_frequencies"])) {
    f.given.push_back(nb::cast<double>(given));
  }
  o.rope.rotary_dim = integer("rotary_dim");
  o.rope.interleave = boolean("rope_interleave");
  o.rope.magnitude = number("rope_magnitude");
  o.rope.max_positions = integer("rope_max_positions");
  o.activation = text("activation") == "sigmoid" ? Activation::kSigmoid : Activation::kSoftmax;
  o.sigmoid_bias = static_cast<float>(number("sigmoid_bias"));
  o.lse_base2 = text("lse_base") == "2";
  o.split = {.fixed_size = integer("fixed_split_size"), .disabled = boolean("disable_split_kv")};
  o.capacity = {.max_requests = integer("max_batch_size"),
                .max_q_tokens = integer("max_q_tokens"),
                .max_kv_indices = integer("max_kv_pages"),
                .max_kv_len = integer("max_kv_len")};
  o.num_workers = integer("num_workers");
  o.tile_rows = integer("tile_rows");
  o.mixed = boolean("mixed");
  o.num_threads = integer("num_threads");
  const std::string backend = text("backend");
  o.backend = backend == "auto"  ? api::BackendChoice::kAuto
              : backend == "cpu" ? api::BackendChoice::kCpu
                                 : api::BackendChoice::kCuda;
  for (const api::Family family : {api::Family::kFa2, api::Family::kFa3}) {
    if (backend == api::family_backend(family)) o.family = family;
  }
  o.device = integer("device");
  o.dequantize_bytes = nb::cast<int64_t>(d["dequantize_bytes"]);
  o.fast_fp8 = boolean("fast_fp8");
  const std::string q = text("q_dtype"), kv = text("kv_dtype"), v = text("v_dtype"),
                    out = text("o_dtype");
  for (int t = 0; t < kNumDTypes; ++t) {
    const DType type = static_cast<DType>(t);
    if (q == dtype_name(type)) o.q_dtype = type;
    if (kv == dtype_name(type)) o.kv_dtype = type;
    if (v == dtype_name(type)) o.v_dtype = type;
    if (out == dtype_name(type)) o.o_dtype = type;
  }
  o.packed_latents = boolean("packed_latents");
  o.custom_variant = boolean("custom_variant");
  o.rewrites_rows = boolean("rewrites_rows");
  o.row_hooks = boolean("row_hooks");
  o.asks_where = boolean("asks_where");
  for (const nb::handle extra : nb::cast<nb::tuple>(d["extras"])) {
    const auto [name, element, rank] = nb::cast<std::tuple<std::string, std::string, int>>(extra);
    o.extras.push_back({name, element_named(element), rank});
  }
  if (nb::object provider = d["provider"]; !provider.is_none()) {
    o.provider = std::make_shared<PythonProvider>(std::move(provider));
  }
  return o;
}

}  // namespace

void bind_engine(nb::module_& m) {
  nb::class_<api::Attention>(m, "Engine",
                             "One attention computation; flashbsr.Attention documents it.")
      .def(nb::new_([](const nb::dict& options) {
        return std::make_shared<api::Attention>(options_from(options));
      }))
      .def(
          "enter",
          [](api::Attention& self, int64_t number, int how) {
            api::enter(number, self.shared_from_this(), (how & kCheck) != 0);
          },
          nb::arg("number"), nb::arg("how"), "Let compiled programs find it by this number.")
      .def("plan", &plan, nb::arg("layout"), nb::arg("custom_mask").none(),
           nb::arg("packed_custom_mask").none(), nb::arg("tree_parents").none(),
           nb::arg("q_positions").none(), nb::arg("share"), nb::arg("stream"))
      .def("plan_like", &plan_like, nb::arg("like"), nb::arg("stream"))
      .def("update", &update, nb::arg("arrays"), nb::arg("stream"), nb::arg("check"))
      .def("run", &run, nb::arg("q"), nb::arg("k"), nb::arg("v").none(), nb::arg("out"),
           nb::arg("lse").none(), nb::arg("q_scale").none(), nb::arg("k_scale").none(),
           nb::arg("v_scale").none(), nb::arg("sinks").none(), nb::arg("alibi_slopes").none(),
           nb::arg("extras"), nb::arg("stream"), nb::arg("how"),
           nb::arg("k_scales").none() = nb::none(), nb::arg("v_scales").none() = nb::none(),
           nb::arg("o_scale") = 1.0, nb::arg("out_scales").none() = nb::none())
      .def(
          "set_workspace",
          [](api::Attention& self, nb::handle workspace) {
            const Import array(workspace, "workspace", true, Memory::kAny);
            const Unlocked unlocked(self);
            self.set_workspace(array.array());
          },
          nb::arg("workspace"))
      .def(
          "keep", [](api::Attention& self, nb::object kept) { self.keep(shared(std::move(kept))); },
          nb::arg("kept"))
      .def("set_workspace_bytes", unlocked(&api::Attention::set_workspace_bytes), nb::arg("bytes"))
      .def(
          "settle",
          [](api::Attention& self, int device, const char* argument) {
            const Unlocked unlocked(self);
            self.settle(device < 0 ? api::Place{} : api::Place{.cuda = true, .device = device},
                        argument);
          },
          nb::arg("device"), nb::arg("argument"))
      .def("place", &place)
      .def("captured", unlocked(&api::Attention::captured))
      .def("kernel_name", unlocked(&api::Attention::kernel_name))
      .def("device_name", unlocked(&api::Attention::device_name))
      .def("bandwidth", unlocked(&api::Attention::bandwidth))
      .def("workspace_size", unlocked(&api::Attention::workspace_size))
      .def("plan_buffer", &plan_buffer)
      .def("run_stats", &run_stats)
      .def("run_dtypes", &run_dtypes);
}

}  // namespace flashbsr::bind
