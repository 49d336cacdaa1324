// What the server context calls: the pair check before anything is loaded, and the shared acceptance rule.

#pragma once

#include "common.h"
#include "log.h"
#include "sampling.h"

#include "dflash-check.h"
#include "dflash-error.h"
#include "dflash-verify.h"

#include <algorithm>
#include <exception>
#include <string>
#include <vector>

// false: the pair cannot work, every reason was logged
inline bool dflash_server_check_pair(const common_params & params) {
    const auto & spec = params.speculative;
    if (std::find(spec.types.begin(), spec.types.end(), COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH) == spec.types.end() || !spec.has_dft()) {
        return true;
    }

    std::vector<std::string> reasons;
    try {
        const auto draft  = dflash_draft_facts_from_file (spec.draft.mparams.path);
        const auto target = dflash_target_facts_from_file(params.model.path);
        reasons = dflash_pair_reasons(target, draft);
    } catch (const std::exception & err) {
        reasons.push_back(err.what());
    }
    for (const auto & reason : reasons) {
        LOG_ERR("draft-dflash: %s\n", reason.c_str());
    }
    return reasons.empty();
}

// the tokens of the text that one verified block yields, at least one
inline std::vector<llama_token> dflash_server_verify(
        common_sampler * smpl, llama_context * ctx, const std::vector<int> & idxs, const llama_tokens & draft) {
    const llama_vocab * vocab = llama_model_get_vocab(llama_get_model(ctx));

    std::vector<llama_token> text;
    text.reserve(idxs.size());
    dflash_verify_match(draft.data(), draft.size(), DFLASH_EOG_STOP_NOT_LAST,
            [&](size_t i) {
                const llama_token id = common_sampler_sample(smpl, ctx, idxs[i], false);
                common_sampler_accept(smpl, id, true);
                return id;
            },
            [&](llama_token id) { return llama_vocab_is_eog(vocab, id); },
            text);
    return text;
}
