/* Tiles of bfloat16, multiplied by the processor's matrix unit, and vectors on the way there and back. */
#include <immintrin.h>

/* Stores of what tiles will load are not the compiler's to move behind this. */
#define STORED __asm__ volatile("" ::: "memory")
#define CLEAR_TILES _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3)
#define LOAD_TILE(tile, from, step) _tile_loadd(tile, from, step)
#define STORE_TILE(tile, to, step) _tile_stored(tile, to, step)
#define MULTIPLY_TILES(c, a, b) _tile_dpbf16ps(c, a, b)
#define HALVES_OF(value) ((halves)_mm512_cvtneps_pbh((__m512)(value)))

/* The places of a vector from `first` to `last`: of words, of halves, of twice as many halves. */
#define SOME(first, last) ((1ull << (last)) - (1ull << (first)))
#define LOAD_WORDS(from, count) ((lanes)_mm512_maskz_loadu_ps((__mmask16)SOME(0, count), from))
#define LOAD_HALVES(from, count) ((halves)_mm256_maskz_loadu_epi16((__mmask16)SOME(0, count), from))
#define STORE_WORDS(to, value, first, last) \
    _mm512_mask_storeu_ps(to, (__mmask16)SOME(first, last), (__m512)(value))
#define STORE_HALVES(to, value, first, last) \
    _mm256_mask_storeu_epi16(to, (__mmask16)SOME(first, last), (__m256i)(value))
#define STORE_PAIRS(to, value, first, last) \
    _mm512_mask_storeu_epi16(to, (__mmask32)SOME(first, last), (__m512i)(value))

/* Libraries keep in mind how they have set up the tiles: it is left as it was. */
#define WITH_TILES(...) \
    { \
        uint8_t before[64] __attribute__((aligned(64))) = {0}, own[64] __attribute__((aligned(64))) = {1}; \
        for (int i = 0; i < 8; ++i) own[16 + 2 * i] = 64, own[48 + i] = 16; \
        __asm__ volatile("" : : "r"(before), "r"(own) : "memory"); /* gcc 12 knows of 8 bytes alone */ \
        _tile_storeconfig(before); \
        _tile_loadconfig(own); \
        __VA_ARGS__; \
        __asm__ volatile("" : : "r"(before) : "memory"); \
        if (before[0]) _tile_loadconfig(before); else _tile_release(); \
    }
