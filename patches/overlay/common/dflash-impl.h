// draft-dflash for llama-server and llama-cli: the shared drafter behind llama.cpp's interface for speculators.
// Included by speculative.cpp after its own implementations, whose base class it extends.

#pragma once

#include "dflash-draft.h"
#include "dflash-error.h"
#include "dflash-slot.h"

// drafts of the first generation have no selector: their logits are sampled on the device, which the base does well
inline bool dflash_speculative_applies(const common_params_speculative & params) {
    return params.draft.ctx_dft && llama_model_dflash_selector_top_k(llama_get_model(params.draft.ctx_dft)) > 0;
}

struct dflash_speculative_impl : public common_speculative_impl {
    common_params_speculative_draft params;

    std::unique_ptr<dflash_drafter> drafter;

    std::vector<dflash_feature_row> rows;
    std::vector<dflash_request>     requests;

    int64_t n_inject_failed = 0;
    int64_t n_invalid       = 0;

    dflash_speculative_impl(const common_params_speculative & params_spec, uint32_t n_seq)
        : common_speculative_impl(COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH, n_seq, params_spec.draft.n_max)
        , params(params_spec.draft)
        , drafter(new dflash_drafter(params.ctx_tgt, params.ctx_dft, n_seq)) {
        const int32_t n_draft_max = drafter->n_draft_max();
        if (params.n_max > n_draft_max || params.n_min > n_draft_max) {
            LOG_WRN("draft-dflash: this draft proposes at most %d tokens (block size %d): n_max %d -> %d, n_min %d -> %d\n",
                    n_draft_max, drafter->block_size(), params.n_max, std::min(params.n_max, n_draft_max),
                    params.n_min, std::min(params.n_min, n_draft_max));
            params.n_max = std::min(params.n_max, n_draft_max);
            params.n_min = std::min(params.n_min, n_draft_max);
        }
        n_max = params.n_max;

        LOG_INF("draft-dflash: block %d, n_max %d, n_min %d, p_min %.2f, candidates %d, %s inside the block, %u sequences\n",
                drafter->block_size(), params.n_max, params.n_min, params.p_min, drafter->top_k(),
                drafter->is_causal() ? "causal" : "not causal", n_seq);
    }

    void begin(llama_seq_id seq_id, const llama_tokens & prompt) override {
        if (seq_id < 0 || seq_id >= (llama_seq_id) n_seq || prompt.empty()) {
            return;
        }
        if (drafter->pos_next(seq_id) == 0) {
            LOG_DBG("draft-dflash: sequence %d starts without features of its prompt of %zu tokens\n", seq_id, prompt.size());
        }
    }

    bool process(const common_batch & batch) override {
        // entries with both a token and an embedding carry no features of their own position
        if (batch.size() <= 0 || batch.has_token() == batch.has_embd()) {
            return true;
        }

        // rows of one sequence may be spread over the batch: group them
        rows.clear();
        for (llama_seq_id seq_id = 0; seq_id < (llama_seq_id) n_seq; ++seq_id) {
            const size_t beg = rows.size();
            for (int32_t i = 0; i < batch.size(); ++i) {
                if (batch.tokens[i].seq_id == seq_id) {
                    rows.push_back({ i, batch.tokens[i].pos[0], seq_id });
                }
            }
            // an M-RoPE image pins its rows to one position: a windowed memory could never free their cells, and the draft
            // may jump over them
            if (batch.has_embd() && rows.size() - beg > 1 && rows[beg].pos == rows.back().pos) {
                rows.resize(beg);
            }
        }

        try {
            drafter->inject(rows.data(), rows.size());
        } catch (const std::exception & err) {
            // without features the drafts are weaker, the text is not: drop them and go on
            if (n_inject_failed++ == 0) {
                LOG_WRN("draft-dflash: features lost, drafts will be weaker for a while: %s\n", err.what());
            }
            for (const auto & row : rows) {
                drafter->rollback(row.seq_id, 0);
            }
        }
        return true;
    }

    void draft(common_speculative_draft_params_vec & dparams) override {
        requests.clear();
        for (llama_seq_id seq_id = 0; seq_id < (llama_seq_id) n_seq; ++seq_id) {
            const auto & dp = dparams[seq_id];
            if (!dp.drafting) {
                continue;
            }
            dflash_request req;
            req.seq_id = seq_id;
            req.pos    = dp.pos0;
            req.anchor = dp.id_last;
            req.n_max  = dp.n_max > 0 ? std::min(params.n_max, dp.n_max) : params.n_max;
            if (dp.dflash && dp.dflash->reject) {
                req.chain  = dp.dflash->chain;
                req.rng    = &dp.dflash->rng;
                req.greedy = dp.dflash->greedy_draft();
            }
            requests.push_back(std::move(req));
        }
        if (requests.empty()) {
            return;
        }

        try {
            drafter->draft(requests, params.p_min);
        } catch (const std::exception & err) {
            LOG_WRN("draft-dflash: no draft this time: %s\n", err.what());
            return;
        }

        for (auto & req : requests) {
            if (req.invalid && n_invalid++ == 0) {
                LOG_WRN("draft-dflash: the draft model returned no valid token (NaN or an id out of range); the text is not affected\n");
            }
            // dropping a sampled draft because it is short would bias the text: n_min is for greedy ones
            if (req.tokens.size() >= (size_t) std::max(0, params.n_min) || !req.q.empty()) {
                auto & dp = dparams[req.seq_id];
                *dp.result = std::move(req.tokens);
                if (dp.dflash) {
                    dp.dflash->q = std::move(req.q);
                }
            }
        }
    }

    void accept(llama_seq_id /*seq_id*/, uint16_t /*n_accepted*/, bool /*is_other*/) override {}
};
