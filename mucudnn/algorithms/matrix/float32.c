/* Elements of 32 bits, which are the sum of two or three bfloat16. */

typedef float element;

enum { ADDENDS_MOST = 3, IN_WORD = 1, WIDE = LANES };

INLINE float value_of(const element from) { return from; }

INLINE lanes load(const element *from) { return *(const loose *)from; }

INLINE lanes load_first(const element *from, const int64_t count) { return LOAD_WORDS(from, count); }

INLINE void put(element *to, const lanes value) { *(loose *)to = value; }

INLINE void put_first(element *to, const lanes value, const int64_t count) { STORE_WORDS(to, value, 0, count); }

/* A word of elements that follow upon one another: here of one. */
INLINE lanes word_of(const lanes first, const lanes second)
{
    (void)second;
    return first;
}

/* Store the elements of words from `first` to `last` at their own places behind `to`. */
INLINE void put_run(element *to, const lanes value, const int first, const int last)
{
    if (first == 0 && last == WIDE)
        *(loose *)to = value;
    else
        STORE_WORDS(to, value, first, last);
}
