//! Bytes as a specification prints them.

/// Bytes from hexadecimal text, two digits each; whatever else is in the text is passed over.
#[must_use]
pub fn hex(text: &str) -> Vec<u8> {
    let value = |digit: char| digit.to_digit(16).map(|value| value as u8);
    let digits: Vec<u8> = text.chars().filter_map(value).collect();
    digits.chunks(2).map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | digit)).collect()
}
