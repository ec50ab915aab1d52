//! Numbers for display.

/// A count with three digits and a suffix for thousands: `7`, `41.3`, `812 k`, `1.26 M`.
#[must_use]
pub fn count(value: f64) -> String {
    scaled(value, &["", " k", " M", " G", " T"])
}

/// A rate: `812 k/s`.
#[must_use]
pub fn per_second(value: f64) -> String {
    count(value) + "/s"
}

/// Nanoseconds: `812 ns`, `7.10 µs`, `43.0 ms`, `1.20 s`.
#[must_use]
pub fn time(ns: f64) -> String {
    scaled(ns, &[" ns", " µs", " ms", " s"])
}

/// Bytes in powers of 1024, as block sizes are: `4 KiB`, `1 GiB`; one decimal if it is not a whole
/// number.
#[must_use]
pub fn bytes(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    let mut whole = bytes as f64;
    while whole >= 1024.0 && unit + 1 < units.len() {
        whole /= 1024.0;
        unit += 1;
    }
    if whole.fract() == 0.0 {
        format!("{whole:.0} {}", units[unit])
    } else {
        format!("{whole:.1} {}", units[unit])
    }
}

/// A ratio: `0.93`, `41.3`; three digits from ten on.
#[must_use]
pub fn ratio(value: f64) -> String {
    if value.abs() < 9.995 { format!("{value:.2}") } else { digits(value) }
}

fn scaled(value: f64, units: &[&str]) -> String {
    let mut value = value;
    let mut unit = 0;
    // 999.5 would be rounded to four digits.
    while value.abs() >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    let text =
        if unit == 0 && value.fract() == 0.0 { format!("{value:.0}") } else { digits(value) };
    text + units[unit]
}

fn digits(value: f64) -> String {
    match value.abs() {
        v if v < 9.995 => format!("{value:.2}"),
        v if v < 99.95 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// Names as a part of a sentence: `a`, `a and b`, `a, b and c`.
#[must_use]
pub fn list(names: &[String]) -> String {
    match names {
        [] => String::new(),
        [one] => one.clone(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits() {
        let cases = [
            (0.0, "0"),
            (7.0, "7"),
            (7.25, "7.25"),
            (41.26, "41.3"),
            (99.96, "100"),
            (999.4, "999"),
            (999.6, "1.00 k"),
            (812_345.0, "812 k"),
            (1_257_000.0, "1.26 M"),
            (9_999_000.0, "10.0 M"),
            (2e15, "2000 T"),
        ];
        for (value, text) in cases {
            assert_eq!(count(value), text, "{value}");
        }
        assert_eq!(per_second(101_000.0), "101 k/s");
    }

    #[test]
    fn times_bytes_and_ratios() {
        assert_eq!(time(812.0), "812 ns");
        assert_eq!(time(7_104.0), "7.10 µs");
        assert_eq!(time(43e6), "43.0 ms");
        assert_eq!(time(90e9), "90.0 s");
        assert_eq!(bytes(4096), "4 KiB");
        assert_eq!(bytes(1 << 30), "1 GiB");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(0), "0 B");
        assert_eq!(ratio(0.933), "0.93");
        assert_eq!(ratio(41.26), "41.3");
        assert_eq!(ratio(9.999), "10.0");
    }
}
