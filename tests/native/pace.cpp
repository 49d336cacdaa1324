// Drives dflash_pace with made-up costs and acceptance, in simulated time.
//
// pace speed  B n_max draft plain row chance spread [rounds]   tokens per ms: adaptive, plain, and the best fixed length
// pace switch ...                                              the draft is hopeless first and good later
// pace crowd ...                                               the number of sequences changes all the time, and one more row
//                                                              that belongs to nobody is verified now and then
// pace classes ...                                             texts of 64 tokens, easy ones and (0.4 less) hard ones in turns
// pace replay 1 n_max draft plain row ntexts file              by class: speed of 0 .. n_max drafted and of adaptive lengths,
//                                                              over real blocks (models/train/evaluate.py --trace)
// pace bias   fault seed trials                                counts of the token behind the anchor, and of pairs

#include "dflash-pace.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <vector>

struct world {
    int    n_seq = 1;
    int    n_max = 7;
    double draft = 6.0;  // ms of a draft: this much for one block and a fifth more for each further one
    double plain = 12.0; // ms of a pass of one row
    double row   = 0.8;  // ms of every further row
    double chance = 0.5; // mean chance of a position
    double spread = 0.3; // how far the confidence of a position lies from the mean
    double noise  = 0.05;
    std::mt19937_64 rng{1};

    double uniform() { return (rng() >> 11) * 0x1.0p-53; }
    double jitter () { return 1.0 + noise * (uniform() - 0.5) + (uniform() < 0.005 ? 3.0 : 0.0) - 0.015; }
    double cost_draft (int blocks) const { return draft * (1.0 + 0.2 * (blocks - 1)); }
    double cost_verify(int rows)   const { return plain + row * (rows - 1); }
    double confidence() { return std::min(0.99, std::max(0.01, chance + spread * (2.0 * uniform() - 1.0))); }
};

// tokens per ms with always n drafted tokens, expected
static double fixed_rate(const world & w, int n) {
    double p = 1.0, e = 1.0;
    for (int i = 0; i < n; ++i) {
        p *= w.chance;
        e += p;
    }
    const double ms = (n > 0 ? w.cost_draft(w.n_seq) : 0.0) + w.cost_verify(w.n_seq * (1 + n));
    return w.n_seq * e / ms;
}

static double best_fixed(const world & w) {
    double best = 0.0;
    for (int n = 0; n <= w.n_max; ++n) {
        best = std::max(best, fixed_rate(w, n));
    }
    return best;
}

// tokens per ms of `rounds` rounds; a new text every 100 rounds
static double run(dflash_pace & pace, world & w, int rounds, bool crowd = false, double * plain = nullptr) {
    double ms = 0.0, tokens = 0.0, plain_ms = 0.0, plain_tokens = 0.0;
    const int n_seq_max = w.n_seq;
    for (int r = 0; r < rounds; ++r) {
        if (crowd && r % 20 == 0) {
            w.n_seq = 1 + (int) (w.uniform() * n_seq_max);
        }
        const int n_extra = crowd && w.n_seq < n_seq_max && r % 40 < 10;
        std::vector<int32_t> seqs;
        for (int s = 0; s < w.n_seq; ++s) {
            seqs.push_back(s);
            if (r % 100 == s * 7 % 100) {
                pace.restart(s);
            }
        }
        std::vector<bool> fixed(w.n_seq, false), drafts;
        pace.begin(seqs, fixed, drafts);

        std::vector<dflash_pace_block> blocks;
        std::vector<std::vector<double>> truth;
        for (int s = 0; s < w.n_seq; ++s) {
            if (!drafts[s]) {
                continue;
            }
            dflash_pace_block block;
            block.seq = s;
            truth.emplace_back();
            for (int i = 0; i < w.n_max; ++i) {
                const double c = w.confidence();
                truth.back().push_back(c);
                block.confidence.push_back((float) std::sqrt(c)); // the draft overrates itself
            }
            blocks.push_back(block);
        }
        plain_ms     += w.cost_verify(w.n_seq + n_extra);
        plain_tokens += w.n_seq;
        int rows = w.n_seq;
        if (!blocks.empty()) {
            const double t = w.cost_draft((int) blocks.size()) * w.jitter();
            ms += t;
            pace.drafted((int) blocks.size(), t);
            pace.cut(blocks);
            for (const auto & b : blocks) {
                rows += b.n;
            }
            if (rows != pace.n_rows()) {
                fprintf(stderr, "rows %d, the pace says %d\n", rows, pace.n_rows());
                exit(1);
            }
        }
        rows += n_extra;
        const double t = w.cost_verify(rows) * w.jitter();
        ms += t;
        pace.verified(rows, t);
        tokens += w.n_seq;
        for (size_t b = 0; b < blocks.size(); ++b) {
            int n = 0;
            while (n < blocks[b].n && w.uniform() < truth[b][n]) {
                ++n;
            }
            tokens += n;
            pace.accepted(blocks[b].seq, n, blocks[b].n);
        }
    }
    w.n_seq = n_seq_max;
    if (plain) {
        *plain = plain_tokens / plain_ms;
    }
    return tokens / ms;
}

// how much less likely the hard texts of `classes` are to be guessed
static const double HARDER = 0.4;

static double run_classes(dflash_pace & pace, const world & easy, int texts) {
    world w = easy;
    double tokens = 0.0, ms = 0.0;
    for (int text = 0; text < texts; ++text) {
        w.chance = easy.chance - (text % 2 ? HARDER : 0.0);
        pace.restart(0);
        for (double n = 0; n < 64;) {
            double took = 0.0;
            std::vector<bool> drafts;
            pace.begin({ 0 }, { false }, drafts);
            std::vector<dflash_pace_block> blocks(drafts[0] ? 1 : 0);
            std::vector<double> truth;
            if (drafts[0]) {
                for (int i = 0; i < w.n_max; ++i) {
                    truth.push_back(w.confidence());
                    blocks[0].confidence.push_back((float) std::sqrt(truth.back()));
                }
                took = w.cost_draft(1) * w.jitter();
                pace.drafted(1, took);
                pace.cut(blocks);
            }
            const int n_draft = blocks.empty() ? 0 : blocks[0].n;
            const double t = w.cost_verify(1 + n_draft) * w.jitter();
            pace.verified(1 + n_draft, t);
            int accepted = 0;
            while (accepted < n_draft && w.uniform() < truth[accepted]) {
                ++accepted;
            }
            pace.accepted(0, accepted, n_draft);
            n      += 1 + accepted;
            tokens += 1 + accepted;
            ms     += took + t;
        }
    }
    return tokens / ms;
}

struct real_text {
    std::string kind;
    std::vector<int> accepted;                  // of the block behind each token
    std::vector<std::vector<float>> confidence; // by position
};

// Servers answer `n_texts` texts each in random order, until 3000 were answered. What a fixed length would have done is
// exact, as a greedy block does not depend on how the text was reached.
static int replay(world w, int n_texts, const char * file) {
    std::vector<real_text> texts;
    std::ifstream in(file);
    for (size_t n; ; ) {
        real_text text;
        if (!(in >> text.kind >> n)) {
            break;
        }
        text.accepted.resize(n);
        text.confidence.assign(n, std::vector<float>(7));
        for (size_t i = 0; i < n; ++i) {
            in >> text.accepted[i];
            for (auto & c : text.confidence[i]) {
                in >> c;
            }
        }
        if (!in) {
            fprintf(stderr, "%s: broken\n", file);
            return 1;
        }
        texts.push_back(text);
    }

    std::mt19937_64 order(7);
    std::map<std::string, std::vector<double>> ms; // [0 .. n_max] fixed lengths, [n_max + 1] adaptive
    for (int answered = 0; answered < 3000; answered += n_texts) {
        std::shuffle(texts.begin(), texts.end(), order);
        dflash_pace pace(1, w.n_max);
        for (int i = 0; i < n_texts && i < (int) texts.size(); ++i) {
            const auto & text  = texts[i];
            const int    n_end = std::min<int>(96, (int) text.accepted.size());
            std::vector<double> took(w.n_max + 2);
            for (int n = 0; n <= w.n_max; ++n) {
                for (int at = 0; at < n_end; at += 1 + std::min(n, text.accepted[at])) {
                    took[n] += (n > 0 ? w.cost_draft(1) : 0.0) + w.cost_verify(1 + n);
                }
            }
            pace.restart(0);
            for (int at = 0; at < n_end; ) {
                std::vector<bool> drafts;
                pace.begin({ 0 }, { false }, drafts);
                std::vector<dflash_pace_block> blocks(drafts[0] ? 1 : 0);
                double t = 0.0;
                if (drafts[0]) {
                    blocks[0].confidence.assign(text.confidence[at].begin(), text.confidence[at].begin() + w.n_max);
                    t = w.cost_draft(1) * w.jitter();
                    pace.drafted(1, t);
                    pace.cut(blocks);
                }
                const int    n = blocks.empty() ? 0 : blocks[0].n;
                const double v = w.cost_verify(1 + n) * w.jitter();
                pace.verified(1 + n, v);
                const int accepted = std::min(n, text.accepted[at]);
                pace.accepted(0, accepted, n);
                at += 1 + accepted;
                took.back() += t + v;
            }
            for (const auto & kind : { std::string("all"), text.kind }) {
                ms[kind].resize(took.size());
                for (size_t n = 0; n < took.size(); ++n) {
                    ms[kind][n] += took[n];
                }
            }
        }
    }
    printf("{");
    for (const auto & [kind, took] : ms) {
        printf("%s\"%s\": [", &kind == &ms.begin()->first ? "" : ", ", kind.c_str());
        for (size_t n = 0; n < took.size(); ++n) {
            printf("%s%.4f", n ? ", " : "", took[0] / took[n]);
        }
        printf("]");
    }
    printf("}\n");
    return 0;
}

// A target and a draft over four tokens whose distributions depend on the previous token. Each block starts from a given
// anchor; the emitted tokens must follow the target whatever the pace cuts.
static int bias(const std::string & fault, uint64_t seed, int trials) {
    const double P[4][4] = { { .55, .25, .15, .05 }, { .10, .60, .20, .10 }, { .25, .25, .25, .25 }, { .70, .10, .10, .10 } };
    const double Q[4][4] = { { .30, .40, .20, .10 }, { .40, .40, .10, .10 }, { .70, .10, .10, .10 }, { .25, .25, .25, .25 } };

    world w;
    w.rng.seed(seed);
    auto draw = [&](const double * p) {
        double u = w.uniform();
        for (int i = 0; i < 3; ++i) {
            if ((u -= p[i]) < 0) {
                return i;
            }
        }
        return 3;
    };

    dflash_pace pace(1, 3);
    long first[4] = {}, pairs[16] = {}, drafted = 0, cut_short = 0;
    for (int t = 0; t < trials; ++t) {
        if (t % 50 == 0) {
            pace.restart(0);
        }
        std::vector<bool> drafts;
        pace.begin({ 0 }, { false }, drafts);

        int x[3], n = 0, prev = 0;
        dflash_pace_block block;
        block.sampled = true;
        if (drafts[0]) {
            for (int i = 0; i < 3; ++i) {
                x[i] = draw(Q[prev]);
                const double top = *std::max_element(Q[prev], Q[prev] + 4);
                block.confidence.push_back((float) (fault == "drawn" ? Q[prev][x[i]] : top));
                prev = x[i];
            }
            pace.drafted(1, 2.0);
            std::vector<dflash_pace_block> blocks = { block };
            pace.cut(blocks);
            n = blocks[0].n;
            if (fault == "later") { // looks at a token that it then drops
                n = x[0] == 0 ? n : 0;
            }
            drafted   += n;
            cut_short += n < 3;
        }
        // costs that make lengths vary: a row is worth it for the likelier half of the confidences
        pace.verified(1 + n, 10.0 + 4.5 * n);

        std::vector<int> text;
        int at = 0, accepted = 0;
        for (int i = 0; ; ++i) {
            const double * p = P[at];
            int y;
            if (i < n) {
                const double * q = Q[at];
                if (w.uniform() * q[x[i]] < p[x[i]]) {
                    y = x[i];
                } else {
                    double rest[4], sum = 0.0;
                    for (int k = 0; k < 4; ++k) {
                        sum += rest[k] = std::max(0.0, p[k] - q[k]);
                    }
                    for (auto & v : rest) {
                        v /= sum;
                    }
                    y = draw(rest);
                }
                text.push_back(y);
                if (y != x[i]) {
                    break;
                }
                accepted++;
                at = y;
            } else {
                text.push_back(draw(p));
                break;
            }
        }
        pace.accepted(0, accepted, n);
        while (text.size() < 2) {
            text.push_back(draw(P[text.back()]));
        }
        first[text[0]]++;
        pairs[4 * text[0] + text[1]]++;
    }
    printf("{\"drafted\": %ld, \"cut\": %ld, \"first\": [%ld, %ld, %ld, %ld], \"pairs\": [", drafted, cut_short, first[0], first[1], first[2], first[3]);
    for (int i = 0; i < 16; ++i) {
        printf("%s%ld", i ? ", " : "", pairs[i]);
    }
    printf("]}\n");
    return 0;
}

int main(int argc, char ** argv) {
    if (argc >= 5 && !strcmp(argv[1], "bias")) {
        return bias(argv[2], strtoull(argv[3], nullptr, 10), atoi(argv[4]));
    }
    if (argc < 9) {
        return 2;
    }
    world w;
    w.n_seq  = atoi(argv[2]);
    w.n_max  = atoi(argv[3]);
    w.draft  = atof(argv[4]);
    w.plain  = atof(argv[5]);
    w.row    = atof(argv[6]);
    w.chance = atof(argv[7]);
    w.spread = atof(argv[8]);
    const int rounds = argc > 9 ? atoi(argv[9]) : 4000;

    if (!strcmp(argv[1], "replay")) {
        return argc == 9 ? replay(w, atoi(argv[7]), argv[8]) : 2;
    }
    dflash_pace pace(w.n_seq, w.n_max);
    double before = 0.0;
    if (!strcmp(argv[1], "switch")) {
        world bad = w;
        bad.chance = 0.0;
        bad.spread = 0.0;
        before = run(pace, bad, 2000) / fixed_rate(bad, 0);
    }
    double plain = fixed_rate(w, 0);
    const bool crowd = !strcmp(argv[1], "crowd");
    if (!strcmp(argv[1], "classes")) {
        world hard = w;
        hard.chance -= HARDER;
        const double best = 2.0 / (1.0 / best_fixed(w) + 1.0 / best_fixed(hard)); // as many tokens of both
        printf("{\"adaptive\": %.6f, \"plain\": %.6f, \"best\": %.6f}\n", run_classes(pace, w, rounds / 40), plain, best);
        return 0;
    }
    const double rate = run(pace, w, rounds, crowd, crowd ? &plain : nullptr);
    printf("{\"adaptive\": %.6f, \"plain\": %.6f, \"best\": %.6f, \"before\": %.6f, \"accepted\": %.6f, \"gave_up\": %s}\n", rate, plain, best_fixed(w),
            before, pace.accepted_mean(), pace.gave_up() ? "true" : "false");
    return 0;
}
