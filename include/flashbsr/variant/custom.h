// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// A user's variant as the kernels take it: constructed from Params, and with the custom mask of
// plan() beside its own where there is one.
#pragma once

#include <flashbsr/variant/custom_mask.h>

namespace flashbsr {

namespace detail {
/// A struct without a constructor is an aggregate whose base takes the Params.
template <class User>
FLASHBSR_FN User make_variant(const Params& p) {
  if constexpr (requires { User(p); }) {
    return User(p);
  } else {
    return User{{p}};
  }
}
}  // namespace detail

/// @tparam kMasked  runs may have a custom mask. Without its code a GPU's kernel is compiled in 0.9
///                  of the time, and Hopper's prefills take 2.5 % less (H200, 4 x 4096).
template <class User, bool kMasked>
struct Custom : User {
  FLASHBSR_FN explicit Custom(const Params& p) : User(detail::make_variant<User>(p)) {}
};

template <class User>
struct Custom<User, true> : User {
  CustomMask custom_mask;

  FLASHBSR_FN explicit Custom(const Params& p)
      : User(detail::make_variant<User>(p)), custom_mask{p.custom_mask} {}

  FLASHBSR_FN bool masks_logits() const { return User::masks_logits() || custom_mask.active(); }

  FLASHBSR_FN bool keeps_all(const Request& request, int32_t q_token, int32_t begin,
                             int32_t end) const {
    return (!User::masks_logits() || User::keeps_all(request, q_token, begin, end)) &&
           (!custom_mask.active() || custom_mask.keeps_all(request, q_token, begin, end));
  }
  FLASHBSR_FN int32_t mask_begin(const Request& request) const {
    return !User::masks_logits()   ? request.mask_begin
           : !custom_mask.active() ? User::mask_begin(request)
                                   : min_of(User::mask_begin(request), request.mask_begin);
  }

  template <class M>
  FLASHBSR_FN typename M::Bool logits_mask(const LogitsAt<M>& at) const {
    typename M::Bool keep = M::all();
    if (User::masks_logits()) keep = User::template logits_mask<M>(at);
    if (custom_mask.active()) keep = keep & custom_mask.keep<M>(at);
    return keep;
  }
};

}  // namespace flashbsr
