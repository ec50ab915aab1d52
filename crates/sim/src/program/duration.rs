//! Durations, as a user writes them.

use std::time::Duration;

/// Reads `90s`, `10m` or `2h`.
pub(super) fn parse(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a duration; use 90s, 10m or 2h");
    let at = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
    let seconds = match &text[at..] {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        _ => return Err(wrong()),
    };
    let number: u64 = text[..at].parse().map_err(|_| wrong())?;
    number.checked_mul(seconds).map(Duration::from_secs).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_a_unit() {
        assert_eq!(parse("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(parse("10m"), Ok(Duration::from_secs(600)));
        assert_eq!(parse("2h"), Ok(Duration::from_secs(7200)));
        for wrong in ["", "m", "10", "10 m", "-1s", "1d", "1.5h", "99999999999999999999s"] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
