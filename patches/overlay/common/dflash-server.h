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
#include <exception>
#include <string>
#include <vector>

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
