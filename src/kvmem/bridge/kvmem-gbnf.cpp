#include "kvmem-gbnf.h"
#include "kvmem-guard.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

static const uint64_t UNBOUNDED = UINT64_MAX;

// llama.cpp's own limit of a repetition: a minimum above it is refused, a maximum above it is none
static const uint64_t MAX_TIMES = 2000;

// elements that all repetitions together may unfold to; a hundred MB at most
static const uint64_t MAX_UNFOLDED = 1 << 20;

// rules and groups; more of them take the search for what can be empty too long
static const size_t MAX_RULES = 1 << 14;

// ways to begin a rule, each of which is a stack of the sampler and a walk of the search for left recursion
static const uint64_t MAX_BEGINNINGS = 1 << 13;

namespace {

struct gbnf_item {
    int      rule = -1; // that it refers to; -1 for a text, a class or a token
    uint64_t size = 1;  // elements, once unfolded
    uint64_t min  = 1;
    uint64_t max  = 1;
};

struct gbnf_rule {
    std::string                         name;
    size_t                              line         = 0; // of the definition; 0 for none
    size_t                              used_at      = 0; // a line that refers to it
    bool                                can_be_empty = false;
    bool                                is_open      = false; // its beginnings are being counted
    uint64_t                            beginnings   = 0;     // 0 for not yet counted
    std::vector<std::vector<gbnf_item>> alternatives;
};

// Reads as llama.cpp's parser does, and takes what it takes; groups become rules of their own.
class gbnf_reader {
  public:
    explicit gbnf_reader(const std::string & text) : text(text) {}

    std::vector<gbnf_rule> read() {
        for (skip_space(); pos < text.size(); skip_space()) {
            read_next();
        }
        if (open.size() > 1) {
            fail("a parenthesis is not closed");
        }
        return std::move(rules);
    }

  private:
    const std::string &        text;
    size_t                     pos        = 0;
    size_t                     line       = 1;
    uint64_t                   n_unfolded = 0;
    std::vector<gbnf_rule>     rules;
    std::map<std::string, int> ids;
    std::vector<int>           open; // the rule and its groups that are being read

    [[noreturn]] void fail(const std::string & what) const {
        const std::string where = open.empty() ? "" : ", rule " + rules[open.front()].name;
        throw kvmem_invalid("line " + std::to_string(line) + where + ": " + what);
    }

    char peek() const { return pos < text.size() ? text[pos] : '\0'; }

    void advance() { line += text[pos++] == '\n'; }

    static bool is_digit(char c) { return c >= '0' && c <= '9'; }

    static bool is_word(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || is_digit(c); }

    void skip_space() {
        while (pos < text.size() && std::string(" \t\r\n#").find(text[pos]) != std::string::npos) {
            if (text[pos] == '#') {
                while (pos < text.size() && text[pos] != '\r' && text[pos] != '\n') {
                    pos++;
                }
            } else {
                advance();
            }
        }
    }

    std::vector<gbnf_item> & sequence() {
        if (open.empty()) {
            fail("a rule must begin with a name and ::=");
        }
        return rules[open.back()].alternatives.back();
    }

    void add(int rule, uint64_t size) {
        gbnf_item item;
        item.rule = rule;
        item.size = size;
        sequence().push_back(item);
    }

    void add_rule(const std::string & name) {
        if (rules.size() == MAX_RULES) {
            fail("there are more than " + std::to_string(MAX_RULES) + " rules and groups");
        }
        gbnf_rule rule;
        rule.name = name;
        rules.push_back(std::move(rule));
    }

    int find_rule(const std::string & name) {
        const auto [found, is_new] = ids.emplace(name, (int) rules.size());
        if (is_new) {
            add_rule(name);
        }
        return found->second;
    }

    void read_next() {
        const char c = peek();
        if (c == '"' || c == '[' || c == '<' || c == '!') {
            read_terminal(c == '"' ? '"' : c == '[' ? ']' : '>');
        } else if (c == '.') {
            pos++;
            add(-1, 1);
        } else if (c == '|') {
            pos++;
            sequence();
            rules[open.back()].alternatives.emplace_back();
        } else if (c == '(') {
            open_group();
        } else if (c == ')') {
            if (open.size() < 2) {
                fail("a parenthesis is closed that was not opened");
            }
            pos++;
            open.pop_back();
        } else if (c == '*' || c == '+' || c == '?') {
            pos++;
            repeat(c == '+' ? 1 : 0, c == '?' ? 1 : UNBOUNDED);
        } else if (c == '{') {
            read_repetition();
        } else if (is_word(c)) {
            read_name();
        } else {
            fail(std::string("unexpected '") + c + "'");
        }
    }

    void read_terminal(char end) {
        const size_t begin = pos++;
        for (; peek() != end || pos >= text.size(); advance()) {
            if (pos + 1 >= text.size()) {
                fail(std::string(end == '"' ? "a text" : end == ']' ? "a class" : "a token") + " is not closed");
            }
            if (end != '>' && text[pos] == '\\') {
                advance();
            }
        }
        pos++;
        add(-1, end == '>' ? 1 : pos - begin - 2);
    }

    void read_name() {
        const size_t begin = pos;
        while (is_word(peek())) {
            pos++;
        }
        const int rule = find_rule(text.substr(begin, pos - begin));
        skip_space();
        if (text.compare(pos, 3, "::=") != 0) {
            rules[rule].used_at = line;
            add(rule, 1);
            return;
        }
        if (open.size() > 1) {
            fail("a parenthesis is not closed");
        }
        pos += 3;
        open             = { rule };
        rules[rule].line = line;
        rules[rule].alternatives.assign(1, {}); // as in llama.cpp, the last definition counts
    }

    void open_group() {
        sequence();
        pos++;
        const int group = (int) rules.size();
        add(group, 1);
        add_rule(rules[open.front()].name);
        rules[group].line = line;
        rules[group].alternatives.emplace_back();
        open.push_back(group);
    }

    uint64_t read_number() {
        if (!is_digit(peek())) {
            fail("a repetition needs a number");
        }
        uint64_t number = 0;
        for (; is_digit(peek()); pos++) {
            number = std::min<uint64_t>(number * 10 + (uint64_t) (peek() - '0'), 1000000000000);
        }
        skip_space();
        return number;
    }

    void read_repetition() {
        pos++;
        skip_space();
        const uint64_t min = read_number();
        uint64_t       max = min;
        if (peek() == ',') {
            pos++;
            skip_space();
            max = is_digit(peek()) ? read_number() : UNBOUNDED;
        }
        if (peek() != '}') {
            fail("a repetition is not closed");
        }
        pos++;
        repeat(min, max);
    }

    void repeat(uint64_t min, uint64_t max) {
        if (sequence().empty()) {
            fail("a repetition needs something before it");
        }
        if (min > max) {
            fail("the repetition {" + std::to_string(min) + "," + std::to_string(max) +
                    "} has a minimum above its maximum");
        }
        if (min > MAX_TIMES) {
            fail("a repetition of at least " + std::to_string(min) + " is above " + std::to_string(MAX_TIMES));
        }
        if (max > MAX_TIMES) {
            max = UNBOUNDED;
        }
        gbnf_item &    item   = sequence().back();
        const uint64_t copies = std::max<uint64_t>(max == UNBOUNDED ? min + 1 : max, 1);
        n_unfolded += (item.size + 3) * copies;
        if (n_unfolded > MAX_UNFOLDED) {
            fail("the repetitions come to more than " + std::to_string(MAX_UNFOLDED) + " elements");
        }
        item.size = min * item.size + (max > min ? 1 : 0);
        item.min  = std::min(min * item.min, MAX_TIMES);
        item.max  = max == UNBOUNDED || item.max == UNBOUNDED ? UNBOUNDED : std::min(max * item.max, MAX_TIMES);
    }
};

class gbnf_check {
  public:
    explicit gbnf_check(std::vector<gbnf_rule> read) : rules(std::move(read)) {}

    void run() {
        bool has_root = false;
        for (const auto & rule : rules) {
            has_root = has_root || (rule.name == "root" && rule.line > 0);
            if (rule.line == 0) {
                throw kvmem_invalid("line " + std::to_string(rule.used_at) + ": no rule is named " + rule.name);
            }
        }
        if (!has_root) {
            throw kvmem_invalid("no rule is named root");
        }
        for (bool is_changed = true; is_changed;) {
            is_changed = false;
            for (auto rule = rules.rbegin(); rule != rules.rend(); ++rule) {
                if (!rule->can_be_empty && find_empty(*rule)) {
                    rule->can_be_empty = is_changed = true;
                }
            }
        }
        for (auto & rule : rules) {
            count(rule, 0);
        }
    }

  private:
    std::vector<gbnf_rule> rules;

    bool can_be_empty(const gbnf_item & item) const {
        return item.min == 0 || item.size == 0 || (item.rule >= 0 && rules[item.rule].can_be_empty);
    }

    bool find_empty(const gbnf_rule & rule) const {
        return std::any_of(rule.alternatives.begin(), rule.alternatives.end(), [&](const auto & items) {
            return std::all_of(items.begin(), items.end(), [&](const auto & item) { return can_be_empty(item); });
        });
    }

    [[noreturn]] static void fail(const gbnf_rule & rule, const std::string & what) {
        throw kvmem_invalid("line " + std::to_string(rule.line) + ", rule " + rule.name + ": " + what);
    }

    // depth: rules that this one was reached through, each of which has one way to begin more
    uint64_t count(gbnf_rule & rule, uint64_t depth) {
        if (rule.beginnings > 0) {
            return rule.beginnings;
        }
        if (rule.is_open) {
            fail(rule, "it refers to itself before any text (left recursion)");
        }
        const std::string too_many = "it can begin in more than " + std::to_string(MAX_BEGINNINGS) + " ways";
        if (depth >= MAX_BEGINNINGS) {
            fail(rule, too_many);
        }
        rule.is_open = true;
        uint64_t n   = 1;
        for (const auto & items : rule.alternatives) {
            for (const auto & item : items) {
                n += item.rule < 0 ? 1 : count(rules[item.rule], depth + 1) * weight(item);
                if (n > MAX_BEGINNINGS) {
                    fail(rule, too_many);
                }
                if (!can_be_empty(item)) {
                    break;
                }
            }
        }
        rule.is_open    = false;
        rule.beginnings = n;
        return n;
    }

    // each copy of what may be empty can be left out at every step
    uint64_t weight(const gbnf_item & item) const {
        const uint64_t copies = item.max == UNBOUNDED ? item.min + 1 : std::max<uint64_t>(item.max, 1);
        return rules[item.rule].can_be_empty ? copies * copies : 1;
    }
};

} // namespace

void kvmem_gbnf_require_bounded(const std::string & grammar) {
    gbnf_check(gbnf_reader(grammar).read()).run();
}
