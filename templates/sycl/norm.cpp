// Rows normalised, after an addend where there is one: a work-group a row, which it reads once for
// each of its sums and once more to write.
KERNEL(1, SG, SUB_GROUPS * SG)
void norm(
    const In *x, const In *other, const In *weight, const In *bias, In *added, In *y, int size,
    long x_line, long other_line, float epsilon) {
  const auto item = item_::get_nd_item<1>();
  const long row = item.get_group(0);
  const int begin = item.get_local_id(0);
  const auto sum = [](float part) {
    return group_::sum(SUB_GROUPS == 1 ? group_::SUB_GROUP : group_::ALL, part);
  };
  // What is normalised is the sum as it is stored, so that who reads that gets the same.
  const auto term = [&](int i) {
    const float own = number(x[row * x_line + i]);
    return other ? number(rounded<In>(own + number(other[row * other_line + i]))) : own;
  };

  float mean = 0.f;
  if constexpr (CENTRED) {
    for (int i = begin; i < size; i += SUB_GROUPS * SG) mean += term(i);
    mean = sum(mean) / size;
  }
  float squares = 0.f;
  for (int i = begin; i < size; i += SUB_GROUPS * SG) {
    const float away = term(i) - mean;
    squares += away * away;
  }
  const float scale = 1.f / math_::sqrt(sum(squares) / size + epsilon);
  for (int i = begin; i < size; i += SUB_GROUPS * SG) {
    const float own = term(i);
    const float scaled = (own - mean) * scale;
    const float weighed = weight ? scaled * number(weight[i]) : scaled;
    if (added) added[row * size + i] = rounded<In>(own);
    y[row * size + i] = rounded<In>(bias ? weighed + number(bias[i]) : weighed);
  }
}
