#include "dflash-draft-ops.h"

#include "models.h"

#include "ggml-backend.h"
#include "ggml-dflash.h"

#include <algorithm>
#include <string>

namespace {

// GGML_DFLASH_DRAFT_OPS
bool dflash_leave_to_base() {
    static const bool mode = ggml_dflash_draft_ops_is("0");
    return mode;
}

bool dflash_no_nodes() {
    static const bool mode = dflash_leave_to_base() || ggml_dflash_draft_ops_is("composite");
    return mode;
}

ggml_backend_dev_t dflash_cpu_device() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

// where a node with this weight is computed
ggml_backend_dev_t dflash_device_of(const ggml_tensor * weight) {
    ggml_backend_buffer_type_t buft = weight->buffer ? ggml_backend_buffer_get_type(weight->buffer) : nullptr;
    ggml_backend_dev_t         dev  = buft && !ggml_backend_buft_is_host(buft) ? ggml_backend_buft_get_device(buft) : nullptr;
    return dev ? dev : dflash_cpu_device();
}

bool dflash_same_device(const ggml_tensor * a, const ggml_tensor * b) {
    return dflash_device_of(a) == dflash_device_of(b);
}

// only devices of which it is known that they look at the tag: others may claim to support any custom node
bool dflash_has_kernel(ggml_backend_dev_t dev, const ggml_tensor * node) {
    if (!dev) {
        return false;
    }
    if (dev != dflash_cpu_device()) {
        if (ggml_backend_dev_backend_reg(dev) == nullptr) {
            return false; // several devices behind one (--split-mode tensor)
        }
        const std::string reg = ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev));
        const bool        gpu = ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_GPU || ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_IGPU;
        if (!gpu || (reg != "CUDA" && reg != "ROCm" && reg != "MUSA")) {
            return false;
        }
    }
    return ggml_backend_dev_supports_op(dev, node);
}

// A tagged node, or null where no device computes it. The CPU's function is in every node, since the scheduler may move any
// node there.
ggml_tensor * dflash_node(ggml_context * ctx, int64_t ne0, int64_t ne1, std::initializer_list<ggml_tensor *> src, ggml_dflash_tag tag, ggml_backend_dev_t dev) {
    const char * name = tag.kind == GGML_DFLASH_CONV ? "ggml_dflash_conv" : "ggml_dflash_lattice";
    if (dflash_no_nodes() || !dflash_cpu_device()) {
        return nullptr;
    }
    auto fun = (ggml_dflash_function) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dflash_cpu_device()), name);
    if (!fun) {
        return nullptr;
    }
    ggml_tensor * args[GGML_MAX_SRC];
    std::copy(src.begin(), src.end(), args);
    ggml_tensor * node = ggml_custom_4d(ctx, GGML_TYPE_F32, ne0, ne1, 1, 1, args, (int) src.size(), fun, GGML_N_TASKS_MAX, nullptr);
    ggml_dflash_set_tag(node, tag);
    return dflash_has_kernel(dev, node) ? node : nullptr;
}

struct dflash_blocks {
    int64_t n;         // blocks
    int64_t n_tokens;  // of each, the anchor included
    int64_t n_drafted; // positions of each to score
};

// Candidates and scores as described for the lattice node in ggml-dflash.h, from ordinary operations.
ggml_tensor * dflash_composite_lattice(llm_graph_context & g, const llama_model & model, const dflash_blocks & b,
        ggml_tensor * logits, ggml_tensor * candidates, ggml_tensor * gate, ggml_tensor * tokens) {
    ggml_context * ctx  = g.ctx0;
    const int64_t  k    = candidates->ne[0];
    const int64_t  rank = gate->ne[0];
    const int64_t  rows = b.n_drafted * b.n;

    const auto codes = [&](ggml_tensor * table, ggml_tensor * ids, int64_t n_ids, int64_t n_pos) {
        ggml_tensor * flat = ggml_is_contiguous(ids) ? ids : ggml_cont(ctx, ids);
        return ggml_reshape_4d(ctx, ggml_get_rows(ctx, table, ggml_reshape_1d(ctx, flat, n_ids * n_pos * b.n)), rank, n_ids, n_pos, b.n);
    };

    // position 1 comes after the anchor, position p after the candidates of p - 1
    ggml_tensor * anchors = ggml_view_2d(ctx, tokens, 1, b.n, b.n_tokens * tokens->nb[0], 0);
    ggml_tensor * before  = ggml_repeat_4d(ctx, codes(model.dflash_selector_prev, anchors, 1, 1), rank, k, 1, b.n);
    if (b.n_drafted > 1) {
        ggml_tensor * earlier = ggml_view_3d(ctx, candidates, k, b.n_drafted - 1, b.n, candidates->nb[1], b.n_drafted * candidates->nb[1], 0);
        before = ggml_concat(ctx, before, codes(model.dflash_selector_prev, earlier, k, b.n_drafted - 1), 2);
    }
    before = ggml_mul(ctx, before, ggml_reshape_4d(ctx, gate, rank, 1, b.n_drafted, b.n));

    ggml_tensor * scores = ggml_mul_mat(ctx, codes(model.dflash_selector_next, candidates, k, b.n_drafted), before);
    ggml_tensor * unary  = ggml_get_rows(ctx, ggml_reshape_3d(ctx, logits, 1, logits->ne[0], rows), candidates);
    scores = ggml_add(ctx, scores, ggml_reshape_4d(ctx, unary, k, 1, b.n_drafted, b.n));

    ggml_tensor * ids   = ggml_reshape_3d(ctx, ggml_cast(ctx, candidates, GGML_TYPE_F32), k, b.n_drafted, b.n);
    ggml_tensor * table = ggml_concat(ctx, ids, ggml_reshape_3d(ctx, scores, k * k, b.n_drafted, b.n), 0);
    table = ggml_pad_ext(ctx, table, 0, (int) (g.n_embd - k - k * k), 1, (int) (b.n_tokens - 1 - b.n_drafted), 0, 0, 0, 0);
    return ggml_reshape_2d(ctx, table, g.n_embd, g.n_tokens);
}

// logits of the tokens that the head has, as the reference transforms them
ggml_tensor * dflash_logits(llm_graph_context & g, const llama_model & model, ggml_tensor * hidden, ggml_tensor * output, ggml_tensor * output_s) {
    ggml_context * ctx = g.ctx0;
    ggml_tensor  * cur = g.build_lora_mm(output, hidden, output_s);
    if (g.hparams.f_logit_scale != 0.0f) {
        cur = ggml_scale(ctx, cur, g.hparams.f_logit_scale);
    }
    const float cap = g.hparams.f_final_logit_softcapping;
    if (cap > 0.0f) {
        cur = ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, cur, 1.0f / cap)), cap);
    }
    GGML_ASSERT(!model.d2t || (model.d2t->type == GGML_TYPE_I64 && model.d2t->ne[0] == cur->ne[0]));
    return cur;
}

// The same for the whole vocabulary: tokens that a draft's own, smaller one lacks can not be drafted.
ggml_tensor * dflash_all_logits(llm_graph_context & g, const llama_model & model, ggml_tensor * some) {
    ggml_context * ctx     = g.ctx0;
    const int64_t  n_vocab = (int64_t) model.vocab.n_tokens();
    ggml_tensor  * all     = ggml_fill(ctx, ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 1, n_vocab, some->ne[1]), -INFINITY);
    ggml_tensor  * values  = ggml_reshape_3d(ctx, some, 1, some->ne[0], some->ne[1]);
    ggml_tensor  * at      = ggml_reshape_3d(ctx, model.d2t, model.d2t->ne[0], 1, 1);
    return ggml_reshape_2d(ctx, ggml_set_rows(ctx, all, values, at), n_vocab, some->ne[1]);
}

} // namespace

ggml_tensor * dflash_build_conv(llm_graph_context & g, ggml_tensor * x, ggml_tensor * dynamic, ggml_tensor * base, int side, ggml_tensor * residual) {
    const int64_t n_blocks = g.ubatch.n_seqs_unq;
    const int64_t n_tokens = g.n_tokens;
    const auto & h = g.hparams;

    const auto rows = [&](const ggml_tensor * t, int64_t width) {
        return t->type == GGML_TYPE_F32 && t->ne[0] == width && t->ne[1] == n_tokens && ggml_is_matrix(t) && t->nb[0] == sizeof(float);
    };
    const int64_t n_taps = h.dflash_conv_kernel_size, group = h.dflash_conv_group_size;
    if (n_blocks <= 0 || n_tokens % n_blocks != 0 || group <= 0 || g.n_embd % group != 0 || !rows(x, g.n_embd) ||
            !rows(dynamic, 2 * n_taps * (g.n_embd / group)) || (residual && !rows(residual, g.n_embd)) || !ggml_is_contiguous(base) ||
            (base->type != GGML_TYPE_F32 && base->type != GGML_TYPE_F16 && base->type != GGML_TYPE_BF16)) {
        return nullptr;
    }
    ggml_dflash_tag tag = {};
    tag.kind     = GGML_DFLASH_CONV;
    tag.n_tokens = (int32_t) (n_tokens / n_blocks);
    tag.n_taps   = (int32_t) n_taps;
    tag.group    = (int32_t) group;
    tag.side     = side;
    return residual
        ? dflash_node(g.ctx0, g.n_embd, n_tokens, { x, dynamic, base, residual }, tag, dflash_device_of(base))
        : dflash_node(g.ctx0, g.n_embd, n_tokens, { x, dynamic, base           }, tag, dflash_device_of(base));
}

bool dflash_has_added(const ggml_tensor * cur, const ggml_tensor * residual) {
    return ggml_dflash_get_tag(cur).kind == GGML_DFLASH_CONV && cur->src[3] == residual;
}

bool dflash_build_head(llm_graph_context & g, const llama_model & model, ggml_tensor * hidden, ggml_tensor * output, ggml_tensor * output_s, ggml_tensor * tokens) {
    if (!model.dflash_selector_hidden || !tokens || dflash_leave_to_base()) {
        return false;
    }
    ggml_context * ctx = g.ctx0;
    auto         * res = g.res;

    dflash_blocks b;
    b.n = g.ubatch.n_seqs_unq;
    GGML_ASSERT(b.n > 0 && g.n_tokens % b.n == 0);
    b.n_tokens  = g.n_tokens / b.n;
    b.n_drafted = std::min<int64_t>(b.n_tokens, g.hparams.dflash_block_size) - 1;
    if (g.n_outputs > 0) {
        b.n_drafted = std::min(b.n_drafted, g.n_outputs);
    }

    ggml_tensor * table = nullptr;
    if (b.n_drafted == 0) {
        ggml_build_forward_expand(g.gf, hidden);
        table = ggml_fill(ctx, ggml_new_tensor_2d(ctx, GGML_TYPE_F32, g.n_embd, g.n_tokens), 0.0f);
    } else {
        const int64_t k = g.hparams.dflash_selector_top_k;

        // nothing is drafted at the anchor
        ggml_tensor * drafted = ggml_view_3d(ctx, hidden, g.n_embd, b.n_drafted, b.n, hidden->nb[1], b.n_tokens * hidden->nb[1], hidden->nb[1]);
        drafted = ggml_reshape_2d(ctx, ggml_is_contiguous(drafted) ? drafted : ggml_cont(ctx, drafted), g.n_embd, b.n_drafted * b.n);

        ggml_tensor * logits = dflash_logits(g, model, drafted, output, output_s);
        ggml_tensor * gate   = g.build_lora_mm(model.dflash_selector_hidden, drafted);
        ggml_tensor * candidates = nullptr;

        // logits that would have to move to another device stay where they are
        if (dflash_same_device(output, model.dflash_selector_prev) && dflash_same_device(output, model.dflash_selector_next) && logits->ne[0] >= k) {
            ggml_dflash_tag tag = {};
            tag.kind      = GGML_DFLASH_LATTICE;
            tag.n_tokens  = (int32_t) b.n_tokens;
            tag.n_drafted = (int32_t) b.n_drafted;
            candidates = ggml_top_k(ctx, logits, (int) k);
            table      = dflash_node(ctx, g.n_embd, g.n_tokens, { logits, candidates, gate, model.dflash_selector_prev, model.dflash_selector_next, tokens, model.d2t },
                    tag, dflash_device_of(model.dflash_selector_next));
        }
        if (!table) {
            logits     = model.d2t ? dflash_all_logits(g, model, logits) : logits;
            candidates = ggml_top_k(ctx, logits, (int) k);
            table      = dflash_composite_lattice(g, model, b, logits, candidates, gate, tokens);
        }
        g.cb(logits, "result_output", -1);
        g.cb(candidates, "dflash2_candidates", -1);
    }
    g.cb(table, "dflash2_lattice", -1);
    res->t_h_nextn = table;
    ggml_build_forward_expand(g.gf, table);
    return true;
}

ggml_tensor * dflash_output_rows(llm_graph_context & g, const llama_model & model, ggml_tensor * hidden) {
    const bool one_by_one = !model.dflash_selector_hidden && !model.dspark_markov_w1;
    return one_by_one && g.n_outputs > 0 && g.n_outputs < g.n_tokens ? ggml_get_rows(g.ctx0, hidden, g.build_inp_out_ids()) : hidden;
}
