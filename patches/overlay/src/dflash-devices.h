// The draft computes with the target's embeddings and output head. They may lie on devices that the draft's own model does
// not use (`--spec-draft-device`), and a scheduler without them would abort.

#pragma once

#include "llama-ext.h"
#include "llama-model.h"

#include "ggml-backend.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

// Devices beyond the model's own that hold tensors which a draft's context shares with the context `other`;
// throws std::runtime_error where it cannot share them.
inline std::vector<ggml_backend_dev_t> dflash_shared_devices(const llama_model & model, const llama_context * other) {
    std::vector<ggml_backend_dev_t> found;
    if (model.arch != LLM_ARCH_DFLASH || other == nullptr) {
        return found;
    }
    const llama_model * target = llama_get_model(other);

    const ggml_tensor * shared[] = {
        model.tok_embd ? nullptr : target->tok_embd,
        model.output   ? nullptr : target->output,
    };
    for (const ggml_tensor * tensor : shared) {
        if (tensor == nullptr || tensor->buffer == nullptr) {
            continue;
        }
        ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(tensor->buffer);
        ggml_backend_dev_t         dev  = ggml_backend_buft_is_host(buft) ? nullptr : ggml_backend_buft_get_device(buft);

        const bool known = std::any_of(model.devices.begin(), model.devices.end(), [&](const llama_device & d) { return d.dev == dev; }) ||
                           std::find(found.begin(), found.end(), dev) != found.end();
        if (dev != nullptr && ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_META) {
            if (llama_model_dflash_selector_top_k(&model) == 0) {
                continue; // drafts of the first generation take no candidates from the logits: the base manages
            }
            throw std::runtime_error(
                "a DFlash draft cannot share an output head that is spread over several devices: use `--split-mode layer` in place of `tensor`");
        }
        if (dev != nullptr && !known && ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU) {
            found.push_back(dev);
        }
    }
    return found;
}
