// The draft's context: its parameters, and its place in the memory plan (--fit).

#pragma once

#include "dflash-draft.h"
#include "fit.h"
#include "gguf.h"
#include "llama.h"

#include "../src/llama-ext.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

// A draft pass is one block per sequence, and features can come in small portions: a micro-batch of the target's size would
// reserve memory for the logits of all its rows.
inline void dflash_context_params(llama_context_params & cparams, const llama_model * model) {
    if (llama_model_dflash_selector_top_k(model) > 0) {
        const uint32_t n = dflash_micro_batch(dflash_block_size(model), std::max<uint32_t>(1, cparams.n_seq_max));
        cparams.n_ubatch = n;
        cparams.n_batch  = n;
    }
}

// The plan measures a draft in a context of its own. A DFlash draft has one only beside its target, whose embeddings and head
// it shares, so a target is laid out for it, without memory of its own.
class dflash_fit_target {
public:
    dflash_fit_target(const char * path_model, llama_model_params mparams, const llama_context_params & cparams, const common_fit_extra_model & extra)
        : extra(extra) {
        if (extra.shares_model || !is_draft(extra.path_model)) {
            return;
        }
        ggml_log_callback log;
        void            * log_data;
        llama_log_get(&log, &log_data);
        llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr); // the plan has just shown all this

        mparams.no_alloc  = true;
        mparams.load_mode = LLAMA_LOAD_MODE_NONE;
        model = llama_model_load_from_file(path_model, mparams);
        ctx   = model ? llama_init_from_model(model, cparams) : nullptr;

        llama_log_set(log, log_data);
        extra.cparams->ctx_other = ctx; // null: the plan says that it could not measure the draft
    }

    ~dflash_fit_target() {
        if (ctx) {
            extra.cparams->ctx_other = nullptr;
        }
        llama_free(ctx);
        llama_model_free(model);
    }

    dflash_fit_target(const dflash_fit_target &) = delete;
    dflash_fit_target & operator=(const dflash_fit_target &) = delete;

private:
    static bool is_draft(const char * path) {
        std::unique_ptr<gguf_context, void (*)(gguf_context *)> file(gguf_init_from_file(path, { /*.no_alloc =*/ true, /*.ctx =*/ nullptr }), gguf_free);
        const int64_t key = file ? gguf_find_key(file.get(), "general.architecture") : -1;
        return key >= 0 && gguf_get_kv_type(file.get(), key) == GGUF_TYPE_STRING && std::string("dflash") == gguf_get_val_str(file.get(), key);
    }

    const common_fit_extra_model & extra;

    llama_model   * model = nullptr;
    llama_context * ctx   = nullptr;
};
