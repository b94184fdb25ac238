/* Elements of bfloat16, which are computed in float32. */

typedef uint16_t element;
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

INLINE real value_of(const element from)
{
    const uint32_t bits = (uint32_t)from << 16;
    real value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE lanes load(const element *from)
{
    return (lanes)(__builtin_convertvector(*(const halves *)from, words) << 16);
}

/* Round to the nearest, ties to even; what is no number stays so. */
INLINE halves rounded(const lanes value)
{
    const words bits = (words)value, absent = (words)(value != value);
    const words near = (bits + 0x7fff + ((bits >> 16) & 1)) & ~absent;
    return __builtin_convertvector((near | (absent & 0x7fc00000)) >> 16, halves);
}

INLINE void put(element *to, const lanes value) { *(halves *)to = rounded(value); }

INLINE element element_of(const real value)
{
    const lanes all = {value};
    return rounded(all)[0];
}
