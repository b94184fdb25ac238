/* Elements of 16 bits, which tiles hold as they are; a word has two. */

typedef uint16_t element;

enum { ADDENDS_MOST = 1, IN_WORD = 2, WIDE = SIDE };

INLINE float value_of(const element from)
{
    const uint32_t bits = (uint32_t)from << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE lanes widened(const halves value) { return (lanes)(__builtin_convertvector(value, words) << 16); }

INLINE lanes load(const element *from) { return widened(*(const halves *)from); }

INLINE lanes load_first(const element *from, const int64_t count) { return widened(LOAD_HALVES(from, count)); }

INLINE void put(element *to, const lanes value) { *(halves *)to = HALVES_OF(value); }

INLINE void put_first(element *to, const lanes value, const int64_t count)
{
    const halves part = HALVES_OF(value);
    STORE_HALVES(to, part, 0, count);
}

/* A word of elements that follow upon one another. */
INLINE lanes word_of(const lanes first, const lanes second)
{
    const words low = __builtin_convertvector(HALVES_OF(first), words);
    return (lanes)(low | __builtin_convertvector(HALVES_OF(second), words) << 16);
}

/* Store the elements of words from `first` to `last` at their own places behind `to`. */
INLINE void put_run(element *to, const lanes value, const int first, const int last)
{
    if (first == 0 && last == WIDE)
        *(loose *)to = value;
    else
        STORE_PAIRS(to, value, first, last);
}
