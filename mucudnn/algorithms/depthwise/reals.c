/* Elements that are computed as they are. */

typedef real element;

INLINE real value_of(const element from) { return from; }

INLINE element element_of(const real value) { return value; }

INLINE lanes load(const element *from) { return *(const loose *)from; }

INLINE void put(element *to, const lanes value) { *(loose *)to = value; }
