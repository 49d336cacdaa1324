#include "dflash-check.h"

#include "dflash-error.h"

#include "ggml-cpp.h"
#include "gguf.h"

#include "../../src/llama-ext.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <set>

// ---------------------------------------------------------------------------------------------------------------------
// reading a header: gguf_get_* abort on a wrong type, so every access looks at the type first

namespace {

struct dflash_header {
    std::string      path;
    gguf_context_ptr ctx;

    explicit dflash_header(const std::string & path) : path(path) {
        FILE * f = fopen(path.c_str(), "rb");
        if (!f) {
            throw dflash_error(DFLASH_E_FILE, dflash_format("cannot open `%s`: %s", path.c_str(), strerror(errno)));
        }
        char         magic[4] = {};
        const size_t n        = fread(magic, 1, sizeof(magic), f);
        fclose(f);
        if (n != sizeof(magic) || memcmp(magic, "GGUF", 4) != 0) {
            throw dflash_error(DFLASH_E_FILE, dflash_format("`%s` is not a GGUF file: it does not start with the letters GGUF", path.c_str()));
        }

        gguf_init_params params = { /*.no_alloc =*/ true, /*.ctx =*/ nullptr };
        ctx.reset(gguf_init_from_file(path.c_str(), params));
        if (!ctx) {
            throw dflash_error(DFLASH_E_FILE, dflash_format("`%s` is a damaged GGUF file: its header cannot be read", path.c_str()));
        }
    }

    int64_t find(const std::string & key) const { return gguf_find_key(ctx.get(), key.c_str()); }

    std::string str(const std::string & key) const {
        const int64_t id = find(key);
        if (id < 0 || gguf_get_kv_type(ctx.get(), id) != GGUF_TYPE_STRING) {
            return "";
        }
        return gguf_get_val_str(ctx.get(), id);
    }

    // an integer key of any width; `missing` if absent or of another kind
    int64_t num(const std::string & key, int64_t missing) const {
        const int64_t id = find(key);
        if (id < 0) {
            return missing;
        }
        switch (gguf_get_kv_type(ctx.get(), id)) {
            case GGUF_TYPE_UINT8:  return gguf_get_val_u8 (ctx.get(), id);
            case GGUF_TYPE_INT8:   return gguf_get_val_i8 (ctx.get(), id);
            case GGUF_TYPE_UINT16: return gguf_get_val_u16(ctx.get(), id);
            case GGUF_TYPE_INT16:  return gguf_get_val_i16(ctx.get(), id);
            case GGUF_TYPE_UINT32: return gguf_get_val_u32(ctx.get(), id);
            case GGUF_TYPE_INT32:  return gguf_get_val_i32(ctx.get(), id);
            case GGUF_TYPE_UINT64: return (int64_t) std::min<uint64_t>(gguf_get_val_u64(ctx.get(), id), INT64_MAX);
            case GGUF_TYPE_INT64:  return gguf_get_val_i64(ctx.get(), id);
            default:               return missing;
        }
    }

    // a floating-point key; `missing` if absent or of another kind
    double real(const std::string & key, double missing) const {
        const int64_t id = find(key);
        if (id < 0) {
            return missing;
        }
        switch (gguf_get_kv_type(ctx.get(), id)) {
            case GGUF_TYPE_FLOAT32: return gguf_get_val_f32(ctx.get(), id);
            case GGUF_TYPE_FLOAT64: return gguf_get_val_f64(ctx.get(), id);
            default:                return missing;
        }
    }

    bool is_array(const std::string & key) const {
        const int64_t id = find(key);
        return id >= 0 && gguf_get_kv_type(ctx.get(), id) == GGUF_TYPE_ARRAY;
    }

    std::vector<int32_t> ints(const std::string & key) const {
        std::vector<int32_t> res;
        if (!is_array(key)) {
            return res;
        }
        const int64_t   id   = find(key);
        const gguf_type type = gguf_get_arr_type(ctx.get(), id);
        if (type != GGUF_TYPE_INT32 && type != GGUF_TYPE_UINT32) {
            return res;
        }
        const auto * data = (const int32_t *) gguf_get_arr_data(ctx.get(), id);
        res.assign(data, data + gguf_get_arr_n(ctx.get(), id));
        return res;
    }

    // a bool array, or one of numbers; empty if absent or of another kind
    std::vector<bool> flags(const std::string & key) const {
        std::vector<bool> res;
        if (!is_array(key)) {
            return res;
        }
        const size_t n = gguf_get_arr_n(ctx.get(), find(key));
        if (gguf_get_arr_type(ctx.get(), find(key)) == GGUF_TYPE_BOOL) {
            const auto * data = (const int8_t *) gguf_get_arr_data(ctx.get(), find(key));
            for (size_t i = 0; i < n; ++i) {
                res.push_back(data[i] != 0);
            }
        } else {
            for (const int32_t v : ints(key)) {
                res.push_back(v != 0);
            }
        }
        return res;
    }

    bool all_true(const std::string & key) const {
        const auto f = flags(key);
        return !f.empty() && std::find(f.begin(), f.end(), false) == f.end();
    }

    bool any_true(const std::string & key) const {
        const auto f = flags(key);
        return std::find(f.begin(), f.end(), true) != f.end();
    }

    std::vector<std::string> strs(const std::string & key) const {
        std::vector<std::string> res;
        if (!is_array(key) || gguf_get_arr_type(ctx.get(), find(key)) != GGUF_TYPE_STRING) {
            return res;
        }
        const int64_t id = find(key);
        const size_t  n  = gguf_get_arr_n(ctx.get(), id);
        res.reserve(n);
        for (size_t i = 0; i < n; ++i) {
            res.emplace_back(gguf_get_arr_str(ctx.get(), id, i));
        }
        return res;
    }

    int64_t tensor(const std::string & name) const { return gguf_find_tensor(ctx.get(), name.c_str()); }

    int64_t dim(const std::string & name, int i) const {
        const int64_t id = tensor(name);
        return id < 0 ? -1 : gguf_get_tensor_ne(ctx.get(), id)[i];
    }

    // the first n values of an I64 tensor; fewer if the file ends before
    std::vector<int64_t> data_i64(const std::string & name, size_t n) const {
        std::vector<int64_t> res(n);
        const uint64_t at = gguf_get_data_offset(ctx.get()) + gguf_get_tensor_offset(ctx.get(), tensor(name));
        std::ifstream  f(path, std::ios::binary);
        f.seekg((std::streamoff) at);
        f.read((char *) res.data(), (std::streamsize) (n * sizeof(int64_t)));
        res.resize((size_t) f.gcount() / sizeof(int64_t));
        return res;
    }
};

std::string dflash_quote(const std::string & s) {
    return "`" + s + "`";
}

bool dflash_ends_with(const std::string & s, const std::string & end) {
    return s.size() >= end.size() && s.compare(s.size() - end.size(), end.size(), end) == 0;
}

// types that the backends multiply with; the others are for indices or for activations
bool dflash_weight_type(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32: case GGML_TYPE_F16: case GGML_TYPE_BF16:
            return true;
        case GGML_TYPE_Q8_1: case GGML_TYPE_Q8_K:
            return false;
        default:
            return ggml_is_quantized(type);
    }
}

// of the architectures below, those that export the output of their last layer too
bool dflash_target_arch_taps_last(const std::string & arch) {
    static const std::set<std::string> archs = { "deepseek4", "mimo2", "nemotron_h", "nemotron_h_moe" };
    return archs.count(arch) > 0;
}

} // namespace

// ---------------------------------------------------------------------------------------------------------------------

bool dflash_target_arch_supported(const std::string & arch) {
    // model files of the base that fill llm_graph_result::t_layer_inp; the converter has the same table, tests compare both
    // with the sources
    static const std::set<std::string> archs = {
        "bailingmoe3", "deepseek4", "gemma4", "hunyuan-dense", "hunyuan_vl", "lfm2", "lfm2moe", "llama", "mimo2", "minimax-01", "minimax-m2",
        "muse-glimmer", "nanbeige", "nemotron_h", "nemotron_h_moe", "gpt-oss", "qwen3", "qwen35", "qwen35moe", "qwen3moe",
        "qwen3next", "qwen4exp",
    };
    return archs.count(arch) > 0;
}

dflash_target_facts dflash_target_facts_from_file(const std::string & path) {
    const dflash_header h(path);

    dflash_target_facts res;
    res.name    = dflash_quote(path);
    res.arch    = h.str("general.architecture");
    res.n_embd  = h.num(res.arch + ".embedding_length", -1);
    res.n_layer = h.num(res.arch + ".block_count", -1);
    res.tokens  = h.strs("tokenizer.ggml.tokens");
    res.n_vocab = res.tokens.empty() ? h.num(res.arch + ".vocab_size", -1) : (int64_t) res.tokens.size();

    const bool split = h.num("split.count", 1) > 1;
    res.has_embd = split || h.tensor("token_embd.weight") >= 0;

    // the last blocks of a target with built-in multi-token prediction are not layers of the trunk
    const int64_t n_nextn = h.num(res.arch + ".nextn_predict_layers", 0);
    if (res.n_layer > n_nextn && n_nextn > 0) {
        res.n_layer -= n_nextn;
    }
    return res;
}

dflash_target_facts dflash_target_facts_from_model(const llama_model * model) {
    dflash_target_facts res;

    char buf[128] = {};
    if (llama_model_meta_val_str(model, "general.architecture", buf, sizeof(buf)) >= 0) {
        res.arch = buf;
    }
    res.name     = "the loaded target";
    res.n_embd   = llama_model_n_embd(model);
    res.n_layer  = llama_model_n_layer(model);

    const llama_vocab * vocab = llama_model_get_vocab(model);
    res.n_vocab = llama_vocab_n_tokens(vocab);
    res.tokens.reserve(res.n_vocab);
    for (int32_t i = 0; i < res.n_vocab; ++i) {
        const char * text = llama_vocab_get_text(vocab, i);
        res.tokens.emplace_back(text ? text : "");
    }
    return res;
}

// ids of the tokens in a draft's own, smaller vocabulary; the base asserts all of this when it scatters the logits
static void dflash_check_d2t(const dflash_header & h, ggml_type type, dflash_draft_facts & draft) {
    const int64_t n = h.dim("d2t", 0);
    if (type != GGML_TYPE_I64) {
        draft.reasons.push_back(dflash_format("%s: d2t is %s, expected i64", draft.name.c_str(), ggml_type_name(type)));
        return;
    }
    if (n > draft.n_vocab) {
        draft.reasons.push_back(dflash_format("%s: d2t lists %lld tokens, the vocabulary has %lld", draft.name.c_str(), (long long) n, (long long) draft.n_vocab));
        return;
    }
    std::vector<bool> seen((size_t) std::max<int64_t>(draft.n_vocab, 0));
    for (const int64_t id : h.data_i64("d2t", (size_t) n)) {
        if (id < 0 || id >= draft.n_vocab) {
            draft.reasons.push_back(dflash_format("%s: d2t names token %lld, expected ids below the vocabulary of %lld", draft.name.c_str(), (long long) id, (long long) draft.n_vocab));
            return;
        }
        if (seen[id]) {
            draft.reasons.push_back(dflash_format("%s: d2t names token %lld twice, expected every token once", draft.name.c_str(), (long long) id));
            return;
        }
        seen[id] = true;
    }
}

dflash_draft_facts dflash_draft_facts_from_file(const std::string & path) {
    const dflash_header h(path);

    dflash_draft_facts res;
    res.name = dflash_quote(path);
    res.arch = h.str("general.architecture");

    auto & reasons = res.reasons;

    if (res.arch.empty()) {
        reasons.push_back(dflash_format("%s has no general.architecture key, a DFlash draft has `dflash`", res.name.c_str()));
        return res;
    }
    if (res.arch == "dflash-draft") {
        reasons.push_back(dflash_format("%s was written by a fork before the names settled (architecture `dflash-draft`): convert the checkpoint again with dflash-convert", res.name.c_str()));
        return res;
    }
    if (res.arch != "dflash") {
        reasons.push_back(dflash_format("%s is a `%s` model, not a DFlash draft (`dflash`)", res.name.c_str(), res.arch.c_str()));
        return res;
    }
    if (h.tensor("markov_w1.weight") >= 0) {
        reasons.push_back(dflash_format("%s is a DSpark draft (it has a Markov head): use llama-server with --spec-type draft-dspark", res.name.c_str()));
        return res;
    }

    res.n_embd       = h.num("dflash.embedding_length", -1);
    res.n_layer      = h.num("dflash.block_count", -1);
    res.block_size   = h.num("dflash.block_size", -1);
    res.mask_token   = h.num("tokenizer.ggml.mask_token_id", -1);
    res.tokens       = h.strs("tokenizer.ggml.tokens");
    res.n_vocab      = (int64_t) res.tokens.size();
    res.own_embd     = h.tensor("token_embd.weight") >= 0;
    res.own_output   = h.tensor("output.weight") >= 0 || res.own_embd;
    res.n_embd_fc    = h.dim("fc.weight", 0);
    res.target_layers = h.ints("dflash.target_layers");
    if (h.all_true("dflash.attention.sliding_window_pattern")) {
        res.n_window = std::max<int64_t>(0, h.num("dflash.attention.sliding_window", 0));
    }

    const char * name = res.name.c_str();

    if (res.n_embd <= 0) {
        reasons.push_back(dflash_format("%s has no usable dflash.embedding_length", name));
    }
    if (res.n_layer <= 0 || res.n_layer > 512) {
        reasons.push_back(dflash_format("%s has no usable dflash.block_count (found %lld, expected 1 to 512)", name, (long long) res.n_layer));
    }
    if (res.tokens.empty()) {
        reasons.push_back(dflash_format("%s carries no token list: convert the checkpoint again with dflash-convert --target", name));
    }
    if (res.target_layers.empty()) {
        reasons.push_back(dflash_format("%s does not say which target layers it reads (dflash.target_layers): convert the checkpoint again with dflash-convert", name));
    }
    if (res.block_size < 2 || res.block_size > DFLASH_MAX_DRAFT + 1) {
        reasons.push_back(dflash_format("%s has block size %lld, expected 2 to %d (dflash.block_size)", name, (long long) res.block_size, DFLASH_MAX_DRAFT + 1));
    }
    if (res.mask_token < 0 || (res.n_vocab > 0 && res.mask_token >= res.n_vocab)) {
        reasons.push_back(dflash_format("%s has mask token %lld, expected an id below its vocabulary of %lld (tokenizer.ggml.mask_token_id)", name, (long long) res.mask_token, (long long) res.n_vocab));
    }
    if (res.n_embd_fc < 0) {
        reasons.push_back(dflash_format("%s lacks the tensor fc.weight", name));
    } else if (!res.target_layers.empty() && res.n_embd > 0 && res.n_embd_fc != (int64_t) res.target_layers.size() * res.n_embd) {
        reasons.push_back(dflash_format("%s fuses features of width %lld, but its %zu target layers of width %lld give %lld", name,
                (long long) res.n_embd_fc, res.target_layers.size(), (long long) res.n_embd, (long long) (res.target_layers.size() * res.n_embd)));
    }

    for (const char * key : { "dflash.attention.layer_norm_rms_epsilon", "dflash.rope.freq_base", "dflash.attention.scale",
                              "dflash.attention.value_scale", "dflash.embedding_scale", "dflash.logit_scale", "dflash.final_logit_softcapping" }) {
        const double value = h.real(key, 0.0);
        if (!std::isfinite(value) || value < 0.0) {
            reasons.push_back(dflash_format("%s has %s %g, expected a finite number that is not negative", name, key, value));
        }
    }
    for (int64_t i = 0; i < gguf_get_n_tensors(h.ctx.get()); ++i) {
        const std::string tensor = gguf_get_tensor_name(h.ctx.get(), i);
        const ggml_type   type   = gguf_get_tensor_type(h.ctx.get(), i);
        if (tensor == "d2t") {
            dflash_check_d2t(h, type, res);
        } else if (!dflash_weight_type(type)) {
            reasons.push_back(dflash_format("%s: %s is %s, which no product can read: expected f32, f16, bf16 or a quantised type", name, tensor.c_str(), ggml_type_name(type)));
        } else if (dflash_ends_with(tensor, "norm.weight") && type != GGML_TYPE_F32) {
            reasons.push_back(dflash_format("%s: %s is %s, expected f32", name, tensor.c_str(), ggml_type_name(type)));
        }
    }
    if (std::set<std::string>(res.tokens.begin(), res.tokens.end()).size() != res.tokens.size()) {
        reasons.push_back(dflash_format("%s lists a token twice (tokenizer.ggml.tokens)", name));
    }

    const int64_t key_length   = h.num("dflash.attention.key_length",   -1);
    const int64_t value_length = h.num("dflash.attention.value_length", key_length);
    if (key_length > 0 && value_length != key_length) {
        reasons.push_back(dflash_format("%s has keys of width %lld and values of width %lld; they must be equal", name, (long long) key_length, (long long) value_length));
    }

    if (h.num("dflash.attention.sliding_window", 0) > 0 && !h.is_array("dflash.attention.sliding_window_pattern")) {
        reasons.push_back(dflash_format("%s has a sliding window but no dflash.attention.sliding_window_pattern array", name));
    } else if (h.num("dflash.attention.sliding_window", 0) > 0 && !h.any_true("dflash.attention.sliding_window_pattern")) {
        reasons.push_back(dflash_format("%s has a sliding window of %lld but no layer that uses it (dflash.attention.sliding_window_pattern)", name,
                (long long) h.num("dflash.attention.sliding_window", 0)));
    }

    if (h.tensor("selector_hidden.weight") >= 0) {
        const int64_t n_drafted = h.tensor("d2t") >= 0 ? h.dim("d2t", 0) : res.n_vocab; // tokens that can be drafted
        res.top_k  = h.num("dflash.selector_top_k",    -1);
        res.rank   = h.num("dflash.selector_rank",     -1);
        res.kernel = h.num("dflash.conv_kernel_size",  -1);
        res.group  = h.num("dflash.conv_group_size",   -1);

        if (res.top_k < 1 || res.top_k > 64) {
            reasons.push_back(dflash_format("%s has %lld selector candidates, expected 1 to 64 (dflash.selector_top_k)", name, (long long) res.top_k));
        } else if (res.n_embd > 0 && res.n_embd < res.top_k*(res.top_k + 1)) {
            reasons.push_back(dflash_format("%s has hidden size %lld, too small for the scores of %lld candidates (at least %lld)", name,
                    (long long) res.n_embd, (long long) res.top_k, (long long) (res.top_k*(res.top_k + 1))));
        } else if (n_drafted > 0 && res.top_k > n_drafted) {
            reasons.push_back(dflash_format("%s asks for %lld candidates out of %lld tokens", name, (long long) res.top_k, (long long) n_drafted));
        }
        if (res.rank < 1 || res.rank > 65536) {
            reasons.push_back(dflash_format("%s has selector rank %lld, expected 1 to 65536 (dflash.selector_rank)", name, (long long) res.rank));
        }
        if (res.kernel < 1 || (res.block_size > 0 && res.kernel > res.block_size)) {
            reasons.push_back(dflash_format("%s has %lld convolution taps, expected 1 to the block size of %lld (dflash.conv_kernel_size)", name, (long long) res.kernel, (long long) res.block_size));
        }
        if (res.group < 1 || (res.n_embd > 0 && res.n_embd % res.group != 0)) {
            reasons.push_back(dflash_format("%s has convolution groups of %lld, which do not divide its hidden size of %lld (dflash.conv_group_size)", name, (long long) res.group, (long long) res.n_embd));
        }
        for (const char * codebook : { "selector_predecessor.weight", "selector_successor.weight" }) {
            const int64_t rows = h.dim(codebook, 1);
            if (rows < 0) {
                reasons.push_back(dflash_format("%s lacks the tensor %s", name, codebook));
            } else if (res.n_vocab > 0 && rows != res.n_vocab) {
                reasons.push_back(dflash_format("%s: %s has %lld rows for a vocabulary of %lld", name, codebook, (long long) rows, (long long) res.n_vocab));
            }
        }
        for (int64_t il = 0; il < std::max<int64_t>(0, std::min<int64_t>(res.n_layer, 512)); ++il) {
            for (const char * base : { "attn_conv_base", "ffn_conv_base" }) {
                const std::string tensor = "blk." + std::to_string(il) + "." + base;
                const int64_t     id     = h.tensor(tensor);
                if (id < 0) {
                    reasons.push_back(dflash_format("%s lacks the tensor %s", name, tensor.c_str()));
                } else if (gguf_get_tensor_type(h.ctx.get(), id) != GGML_TYPE_F32) {
                    reasons.push_back(dflash_format("%s: %s is %s, expected f32", name, tensor.c_str(), ggml_type_name(gguf_get_tensor_type(h.ctx.get(), id))));
                }
            }
        }
    } else if (h.tensor("selector.hidden_proj.weight") >= 0 || h.tensor("selector.pred_codebook") >= 0) {
        reasons.push_back(dflash_format("%s uses a fork's tensor names (selector.pred_codebook): convert the checkpoint again with dflash-convert", name));
    }
    return res;
}

std::vector<std::string> dflash_pair_reasons(const dflash_target_facts & target, const dflash_draft_facts & draft) {
    std::vector<std::string> reasons;

    const char * tgt = target.name.c_str();
    const char * dft = draft.name.c_str();

    if (target.arch == "dflash") {
        if (draft.arch != "dflash" && !draft.arch.empty()) {
            reasons.push_back(dflash_format("draft and target are swapped: %s is the draft", tgt));
            return reasons;
        }
        reasons.push_back(dflash_format("the target %s is itself a DFlash draft", tgt));
        return reasons;
    }

    reasons.insert(reasons.end(), draft.reasons.begin(), draft.reasons.end());
    if (draft.arch != "dflash") {
        return reasons;
    }

    if (target.arch.empty() || target.n_embd <= 0 || target.n_layer <= 0) {
        reasons.push_back(dflash_format("%s is not a language model: its header has no architecture, width or depth", tgt));
        return reasons;
    }
    if (!dflash_target_arch_supported(target.arch)) {
        reasons.push_back(dflash_format("targets of architecture `%s` do not export the hidden states that a draft reads", target.arch.c_str()));
    }
    if (draft.n_embd > 0 && draft.n_embd != target.n_embd) {
        reasons.push_back(dflash_format("hidden size: the draft has %lld, the target %lld", (long long) draft.n_embd, (long long) target.n_embd));
    }
    for (const int32_t id : draft.target_layers) {
        // id is the input of layer id; the output of the last layer (id == n_layer) is exported by few architectures
        const int64_t last = dflash_target_arch_taps_last(target.arch) ? target.n_layer : target.n_layer - 1;
        if (id < 0 || id > last) {
            reasons.push_back(dflash_format("depth: the draft reads the input of target layer %d, the target's layers are 0 to %lld", id, (long long) last));
        }
    }
    if (draft.n_vocab > 0 && target.n_vocab > 0 && draft.n_vocab != target.n_vocab) {
        reasons.push_back(dflash_format("vocabulary: the draft has %lld tokens, the target %lld", (long long) draft.n_vocab, (long long) target.n_vocab));
    } else if (!draft.tokens.empty() && draft.tokens.size() == target.tokens.size()) {
        // renamed reserved tokens are harmless, another vocabulary of the same size is not
        size_t n_diff  = 0;
        size_t i_first = 0;
        for (size_t i = 0; i < draft.tokens.size(); ++i) {
            if (draft.tokens[i] != target.tokens[i]) {
                i_first = n_diff == 0 ? i : i_first;
                ++n_diff;
            }
        }
        if (n_diff > std::max<size_t>(16, draft.tokens.size() / 100)) {
            reasons.push_back(dflash_format("vocabulary: %zu of %zu tokens differ, the first is %zu: `%s` in the draft, `%s` in the target",
                    n_diff, draft.tokens.size(), i_first, draft.tokens[i_first].c_str(), target.tokens[i_first].c_str()));
        }
    }
    if (!target.has_embd && !draft.own_embd) {
        reasons.push_back(dflash_format("%s has no token embedding that the draft %s could share", tgt, dft));
    }
    return reasons;
}
