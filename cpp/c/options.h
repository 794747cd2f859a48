// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Options of the C interface, checked, as those of the engine.
#pragma once

#include <flashbsr/c_api.h>

#include "../api/options.h"

namespace flashbsr::c {

fbsr_attention_options default_options();
api::AttentionOptions checked_options(const fbsr_attention_options& given);

}  // namespace flashbsr::c
