// What the server context calls: the pair check before anything is loaded, and the shared acceptance rule.

#pragma once

#include "common.h"
#include "log.h"
#include "sampling.h"

#include "dflash-check.h"
#include "dflash-draft.h"
#include "dflash-error.h"
#include "dflash-slot.h"
#include "dflash-verify.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

// What all slots verify at once must fit a batch, and a block with its snapshots a micro-batch: the base asserts both. Batches
// grow, but not beyond the context; there drafts shrink. An empty string, or why nothing fits.
inline std::string dflash_server_fit(common_params & params) {
    auto & n_max = params.speculative.draft.n_max;

    const int32_t n_slots = std::max(1, params.n_parallel);
    const int32_t n_ctx   = params.n_ctx > 0 ? params.n_ctx : INT32_MAX;
    if (n_ctx / n_slots < 2) {
        return dflash_format("%d slots share a context of %d tokens: no draft fits, take fewer slots (-np) or more context (-c)", n_slots, n_ctx);
    }
    if (n_max > n_ctx / n_slots - 1) {
        LOG_WRN("draft-dflash: %d slots share a context of %d tokens: drafting %d tokens instead of %d\n", n_slots, n_ctx, n_ctx / n_slots - 1, n_max);
        n_max = n_ctx / n_slots - 1;
    }
    const int32_t n_batch  = n_slots * (1 + n_max);
    const int32_t n_ubatch = n_max + 2;
    if (params.n_batch < n_batch) {
        LOG_WRN("draft-dflash: %d slots verify %d tokens each: batch size %d instead of %d (-b)\n", n_slots, 1 + n_max, n_batch, params.n_batch);
        params.n_batch = n_batch;
    }
    if (params.n_ubatch < n_ubatch) {
        LOG_WRN("draft-dflash: micro-batch size %d instead of %d (-ub)\n", n_ubatch, params.n_ubatch);
        params.n_ubatch = n_ubatch;
    }
    return "";
}

// false: the pair cannot work, every reason was logged. Sets the longest draft if the user has not and lengths can
// adapt to it (drafts with a selector).
inline bool dflash_server_check_pair(common_params & params) {
    auto & spec = params.speculative;
    if (std::find(spec.types.begin(), spec.types.end(), COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH) == spec.types.end() || !spec.has_dft()) {
        return true;
    }

    std::vector<std::string> reasons;
    try {
        const auto draft  = dflash_draft_facts_from_file (spec.draft.mparams.path);
        const auto target = dflash_target_facts_from_file(params.model.path);
        reasons = dflash_pair_reasons(target, draft);
        if (spec.draft.dflash_n_max && draft.top_k > 0 && draft.block_size > 1 && draft.block_size <= DFLASH_MAX_DRAFT + 1) {
            spec.draft.n_max = (int32_t) draft.block_size - 1;
        }
        const std::string unfit = reasons.empty() ? dflash_server_fit(params) : "";
        if (!unfit.empty()) {
            reasons.push_back(unfit);
        }
    } catch (const std::exception & err) {
        reasons.push_back(err.what());
    }
    for (const auto & reason : reasons) {
        LOG_ERR("draft-dflash: %s\n", reason.c_str());
    }
    return reasons.empty();
}

// a request begins: which rule verifies its drafts
inline void dflash_server_begin(dflash_slot & slot, common_sampler * smpl, const common_params_sampling & params, int32_t mode) {
    slot.mode  = mode;
    slot.chain = common_sampler_get(smpl);
    slot.q.clear();
    slot.n_ahead = 0;
    slot.overlap.restart();

    // with a grammar or on-device sampling there is no p to compare with at every position
    const bool has_grammar = !common_grammar_value(params.grammar).empty();
    slot.reject = mode != DFLASH_VERIFY_MATCH && params.temp > 0.0f && !has_grammar && !params.backend_sampling &&
            dflash_chain_has_distribution(slot.chain);
    slot.fixed = slot.reject && params.seed != LLAMA_DEFAULT_SEED;

    // a stream of its own, reproducible with the request's seed
    slot.rng.seed(((uint64_t) llama_sampler_get_seed(slot.chain) << 32) ^ UINT64_C(0x9e3779b97f4a7c15));
}

// a round begins: earlier distributions are void
inline dflash_slot * dflash_server_prepare(dflash_slot & slot, dflash_request_stats & stats) {
    slot.stats = &stats;
    slot.q.clear();
    slot.n_drafted = 0;
    return &slot;
}

// Choose the tokens of the text that one verified block yields, at least one. A replayed draft was decided in an earlier
// pass: its tokens are taken as they are, only the streams of the samplers advance.
inline std::vector<llama_token> dflash_server_verify(
        dflash_slot & slot, common_sampler * smpl, llama_context * ctx, const std::vector<int> & idxs, const llama_tokens & draft,
        bool is_replay, size_t n_probs) {
    const llama_vocab * vocab = llama_model_get_vocab(llama_get_model(ctx));

    if (!is_replay) {
        slot.n_drafted = draft.size();
    }
    slot.i_rows = idxs;
    slot.probs.clear();

    std::vector<llama_token> text;
    text.reserve(idxs.size());
    dflash_verify_match(draft.data(), draft.size(), DFLASH_EOG_STOP_NOT_LAST,
            [&](size_t i) {
                const bool decided = is_replay && i < draft.size();

                const bool drawn   = !is_replay && i < slot.q.size() && i < draft.size() && slot.q[i].drawn == draft[i];

                llama_token id;
                {
                    dflash_coupling coupling(drawn ? &slot.q[i] : nullptr, slot.rng, &slot.overlap);
                    id = common_sampler_sample(smpl, ctx, idxs[i], false);
                }
                if (decided) {
                    id = draft[i];
                }
                if (n_probs > 0) {
                    const auto * cur = common_sampler_get_candidates(smpl, true);
                    dflash_token_probs probs;
                    for (size_t j = 0; j < cur->size; ++j) {
                        if (cur->data[j].id == id) {
                            probs.p = cur->data[j].p;
                            break;
                        }
                    }
                    probs.top.assign(cur->data, cur->data + std::min(cur->size, n_probs));
                    slot.probs.push_back(std::move(probs));
                }
                common_sampler_accept(smpl, id, true);
                return id;
            },
            [&](llama_token id) { return llama_vocab_is_eog(vocab, id); },
            text);
    return text;
}

// probabilities of token `i` of a verified block as they were when it was chosen (post-sampling)
template <typename Result>
void dflash_server_post_probs(const dflash_slot & slot, size_t i, llama_context * ctx, bool special, Result & result) {
    if (i >= slot.probs.size()) {
        return;
    }
    result.prob = slot.probs[i].p;
    for (const auto & t : slot.probs[i].top) {
        if (t.p == 0.0f) {
            break;
        }
        result.probs.push_back({ t.id, common_token_to_piece(ctx, t.id, special), t.p });
    }
}
