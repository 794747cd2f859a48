// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Attentions by number: what programs that somebody else compiles and runs hold in place of one.
#pragma once

#include <cstdint>
#include <memory>

#include "attention.h"

namespace flashbsr::api {

/// Lets Used find it. The number keeps nothing alive, and no other attention ever has it.
/// `check`: in every run, RunOptions::check.
void enter(int64_t number, const std::shared_ptr<Attention>& attention, bool check);

/// An attention that stays while it is used, whoever else lets go of it.
class Used {
 public:
  /// Throws where the attention is gone, and after end_programs().
  explicit Used(int64_t number);
  ~Used();
  Used(const Used&) = delete;
  Used& operator=(const Used&) = delete;
  Attention* operator->() const { return attention_.get(); }
  bool check() const { return check_; }

 private:
  bool check_ = false;
  std::shared_ptr<Attention> attention_;
};

/// Waits for those in use, and refuses others from now on: the caller's language ends, whose
/// objects an attention keeps.
void end_programs();

}  // namespace flashbsr::api
